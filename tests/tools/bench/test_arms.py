"""Arms, settings and refusals of `sglang-dflash bench`."""

from __future__ import annotations

import argparse
import inspect
import math
from pathlib import Path
from typing import Any

import pytest

from sglang_dflash.common.command_line import given as given_by
from sglang_dflash.tools import cli
from sglang_dflash.tools.bench import arms, compiled
from sglang_dflash.tools.bench.arms import arms_of, group_arms
from sglang_dflash.tools.bench.server import ServerConfig, demo_config
from sglang_dflash.tools.bench.settings import BenchSettings
from sglang_dflash.tools.cli import bench
from sglang_dflash.tools.demo_pairs.pairs import demo_pair
from tests.errors import refused

ALL_ARMS = ("ar", "dflash", "builtin")


def settings_for(accelerator: bool = False, **asked: Any) -> BenchSettings:
    return BenchSettings.for_machine(asked, accelerator)


def started(accelerator: bool = False, **asked: Any) -> dict[str, ServerConfig]:
    found = arms_of(settings_for(accelerator, **asked), accelerator)
    return {name: one for name, one in found.items() if isinstance(one, ServerConfig)}


def test_arms_and_their_flags() -> None:
    of = started(arms=("ar", "builtin", "dflash"), server_flags=("--page-size", "16"))
    assert list(of) == ["ar", "builtin", "dflash"]
    assert "--speculative-algorithm" not in of["ar"].flags
    assert "--speculative-dflash-worker" not in of["dflash"].flags
    assert of["builtin"].flags["--speculative-dflash-worker"] == "builtin"
    assert of["dflash"].args()[-2:] == ["--page-size", "16"]
    dflash = started(True, target="T", draft="D", arms=("dflash",))["dflash"].flags
    assert dflash["--model-path"] == "T" and dflash["--speculative-draft-model-path"] == "D"
    assert dflash["--dtype"] == "bfloat16"
    # The width that a server has by default; simulated steps and those of embedded pairs are whole.
    assert "--speculative-dflash-width" not in dflash
    pair = {"target": "T", "draft": "D", "arms": ("dflash",)}
    for one in (started(True, **pair, simulated_acceptance=3.0), started(arms=("dflash",))):
        assert one["dflash"].flags["--speculative-dflash-width"] == "fixed"


@pytest.mark.parametrize("pair", ["dense", "hybrid", None])
def test_servers_on_a_gpu_compute_in_16_bits(pair: str | None) -> None:
    """SGLang's norm and its prefill of Gated DeltaNet layers refuse float32 there."""
    asked = {"target": "T", "draft": "D"} if pair is None else {"pair": pair}
    for accelerator, dtype in ((True, "bfloat16"), (False, "float32")):
        servers = [*started(accelerator, **asked, arms=ALL_ARMS).values()]
        if pair is not None:
            servers.append(demo_config(demo_pair(pair), dflash=True, accelerator=accelerator))
        assert {of.flags["--dtype"] for of in servers} == {dtype}
        assert not any("--attention-backend" in of.flags for of in servers)
    with refused("dtype", "float32"):
        started(True, **asked, dtype="float32")
    assert started(True, **asked, dtype="float16")["ar"].flags["--dtype"] == "float16"


@pytest.mark.parametrize("given", [{}, {"target": "T", "draft": "D"}], ids=["embedded", "given"])
def test_all_arms_run_as_many_requests_at_a_time(given: dict[str, Any]) -> None:
    """SGLang's default with drafts is lower than without."""
    flag = "--max-running-requests"
    for levels, expected in (("1,48", None), ("1,64", 64)):
        servers = started(True, **given, arms=ALL_ARMS, concurrency=levels)
        assert {server.flags.get(flag) for server in servers.values()} == {expected}
    theirs = pytest.importorskip("sglang.srt.arg_groups.speculative_hook")
    assert "max_running_requests=48" in inspect.getsource(theirs._handle_dflash)


def test_sampled_arms_are_servers_whose_tokens_a_seed_decides() -> None:
    flag = "--enable-deterministic-inference"
    assert all(flag in one.args() for one in started(temperature=0.7).values())
    assert not any(flag in one.args() for one in started().values())
    with refused("arms", "builtin"):
        settings_for(temperature=0.7, arms=("ar", "builtin"))


def test_sglangs_flag_names_are_taken() -> None:
    parser = argparse.ArgumentParser()
    bench.arguments(parser)
    words = "--dataset-name demo --max-concurrency 4 --seed 7 --num-prompts 9"
    ours = settings_for(**given_by(parser.parse_args(words.split()), BenchSettings))
    assert (ours.dataset, ours.levels, ours.seed, ours.num_prompts) == (("demo",), (4,), 7, 9)


def test_simulation_reaches_arms_that_draft_and_weights_of_given_pairs() -> None:
    def served(**asked: Any) -> dict[str, tuple[bool, bool]]:
        of = started(True, arms=ALL_ARMS, **asked)
        return {
            name: (arms.SIMULATED_LENGTH in one.env, "dummy" in one.args())
            for name, one in of.items()
        }

    pair = {"target": "T", "draft": "D"}
    for asked, dummy in ((pair, True), ({"pair": "hybrid"}, False)):
        found = served(simulated_acceptance=3.5, **asked)
        assert found == {"ar": (False, dummy), **dict.fromkeys(ALL_ARMS[1:], (True, dummy))}
    assert served(**pair) == dict.fromkeys(ALL_ARMS, (False, False))


def test_servers_log_short_compilations_too() -> None:
    """SGLang's name of the setting, and its line."""
    pytest.importorskip("sglang.srt")
    from sglang.srt.environ import envs
    from sglang.srt.utils import triton_load_watch

    (name, seconds), *_ = compiled.ENVIRONMENT.items()
    assert not _ and float(seconds) < 0.1 < getattr(envs, name).get()
    assert compiled.LOGGED in Path(triton_load_watch.__file__).read_bytes()
    assert all(compiled.ENVIRONMENT.items() <= of.env.items() for of in started().values())


def test_a_simulation_in_the_environment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_SIMULATE_ACC_LEN", "5")
    with refused("SGLANG_SIMULATE_ACC_LEN", "5"):
        started()


def test_defaults_depend_on_the_machine() -> None:
    cpu, gpu = settings_for(False), settings_for(True)
    assert list(started()) == ["ar", "dflash"]
    assert (cpu.levels, cpu.datasets) == ((1, 8, 16), ("demo", "stdlib"))
    # The embedded pair has 16 texts, and each level needs as many.
    assert (gpu.levels, gpu.num_prompts, gpu.max_new_tokens) == ((1, 8, 16), 128, 1024)
    assert settings_for(True, target="T", draft="D").levels == (1, 8, 16, 32)
    assert (cpu.dtype, gpu.dtype) == ("float32", "bfloat16")
    assert settings_for(False, target="T", draft="D").datasets == ("stdlib",)
    assert settings_for(True, target="T", draft="D").dtype == "bfloat16"
    assert settings_for(pair="smollm2").datasets == ("chat",)


def test_running_servers_are_arms_by_their_url() -> None:
    of = settings_for(True, base_url=("vllm=http://x:1", "own=http://y:2/v1"), pair="hybrid")
    assert arms_of(of, accelerator=True) == {"vllm": "http://x:1", "own": "http://y:2/v1"}
    assert of.embedded == "hybrid" and of.datasets == ("demo", "stdlib")
    # As they tell.
    assert of.dtype == "auto"


@pytest.mark.parametrize(
    ("accelerator", "available", "at_once"),
    # Two servers of the pair: 3 GiB each, and four times 5.7 MB.
    [
        (False, 7 << 30, True),
        (False, 6 << 30, False),
        (False, None, False),
        (True, 99 << 30, False),
    ],
)
def test_servers_of_given_models_run_at_once_where_they_surely_fit(
    accelerator: bool, available: int | None, at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arms, "available_bytes", lambda: available)
    pair = demo_pair("dense")
    given = settings_for(accelerator, target=str(pair.target), draft=str(pair.draft))
    made = arms_of(given, accelerator)
    one_by_one = [{name: arm} for name, arm in made.items()]
    assert group_arms(given, made, accelerator) == ([made] if at_once else one_by_one)
    for others in (settings_for(accelerator), settings_for(accelerator, base_url=URL, target="T")):
        made = arms_of(others, accelerator)
        assert group_arms(others, made, accelerator) == [made]


URL = ("a=http://x",)


@pytest.mark.parametrize(
    "asked, field, value",
    [
        ({"arms": ("ar", "ar")}, "arms", ("ar", "ar")),
        ({"concurrency": "1,x"}, "concurrency", "1,x"),
        ({"concurrency": "8,8"}, "concurrency", "8,8"),
        ({"num_prompts": 0}, "num_prompts", 0),
        ({"max_new_tokens": -1}, "max_new_tokens", -1),
        ({"simulated_acceptance": 0.5}, "simulated_acceptance", 0.5),
        ({"simulated_acceptance": math.nan}, "simulated_acceptance", math.nan),
        ({"simulated_acceptance": math.inf}, "simulated_acceptance", math.inf),
        ({"simulated_acceptance": 2.0, "base_url": URL}, "simulated_acceptance", 2.0),
        ({"target": "T"}, "draft", None),
        ({"pair": "dense", "target": "T", "draft": "D"}, "pair", "dense"),
        ({"base_url": ("http://x",)}, "base_url", "http://x"),
        ({"base_url": URL * 2}, "base_url", URL * 2),
        ({"base_url": URL, "arms": ("ar",)}, "arms", ("ar",)),
        ({"base_url": URL, "server_flags": ("--x",)}, "server_flags", ("--x",)),
        ({"dataset": ("demo",), "dataset_file": "x"}, "dataset_file", "x"),
    ],
    ids=str,
)
def test_bad_input_is_refused_by_name(asked: dict[str, Any], field: str, value: object) -> None:
    with refused(field) as error:
        settings_for(**asked)
    assert error.value.value is value or error.value.value == value


@pytest.mark.parametrize(
    "asked, message",
    [
        (["--base-url", "a=http://x", "--", "-x"], "flags after --: ('-x',); is for servers"),
        (["--thinking", "on"], "--thinking: 'on'; none of demo, stdlib"),
        (
            ["--base-url", "a=http://127.0.0.1:9"],
            "http://127.0.0.1:9/server_info cannot be reached: ",
        ),
        (["--out", __file__], f"--out: {__file__!r}; a folder that can be made"),
    ],
    ids=str,
)
def test_errors_have_the_commands_words(
    asked: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", "--out", str(tmp_path), *asked]) == 1
    shown = capsys.readouterr()
    assert not shown.out and shown.err.splitlines()[-1].startswith(f"sglang-dflash: {message}")
