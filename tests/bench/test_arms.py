"""Arms, settings and refusals of `sglang-dflash bench`."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import pytest

from sglang_dflash import cli
from sglang_dflash.bench.arms import Arms, arms_of, opened
from sglang_dflash.bench.compare import load_prompts
from sglang_dflash.bench.server_config import ServerConfig
from sglang_dflash.bench.settings import BLOCK_ARMS, BenchSettings
from sglang_dflash.cli import bench
from sglang_dflash.facts.command_line import given
from sglang_dflash.facts.errors import ConfigError
from tests.bench.fake_server import Started


def settings_for(accelerator: bool = False, **asked: Any) -> BenchSettings:
    return BenchSettings.for_machine(asked, accelerator)


def arms(accelerator: bool = False, **asked: Any) -> Arms:
    return arms_of(settings_for(accelerator, **asked), accelerator)


def started(of: Arms, name: str) -> ServerConfig:
    config = of[name]
    assert isinstance(config, ServerConfig)
    return config


def test_arms_and_their_flags() -> None:
    of = arms(
        arms=("ar", "builtin", "dflash"),
        block_size=(4, 8),
        server_flags=("--page-size", "16"),
        concurrency="1,32",
    )
    assert list(of) == ["ar", "builtin@4", "builtin@8", "dflash@4", "dflash@8"]
    assert "--speculative-algorithm" not in started(of, "ar").flags
    assert "--speculative-dflash-worker" not in started(of, "dflash@4").flags
    assert started(of, "builtin@4").flags["--speculative-dflash-worker"] == "builtin"
    last = ["--speculative-num-draft-tokens", "8", "--page-size", "16"]
    assert started(of, "dflash@8").args()[-4:] == last
    pair: dict[str, Any] = {"target": "T", "draft": "D", "arms": ("ngram", "dflash")}
    own = settings_for(True, **pair)
    assert own.in_turn and own.levels == (1, 8, 16, 32) and own.dtype == "bfloat16"
    of = arms_of(own, True)
    assert started(of, "ngram").flags["--speculative-algorithm"] == "NGRAM"
    dflash = started(of, "dflash").flags
    assert dflash["--model-path"] == "T" and dflash["--speculative-draft-model-path"] == "D"
    assert dflash["--dtype"] == "bfloat16" and "--mem-fraction-static" not in dflash


def test_sglangs_flag_names_are_taken() -> None:
    parser = argparse.ArgumentParser()
    bench.arguments(parser)

    def parsed(words: str) -> BenchSettings:
        return settings_for(**given(parser.parse_args(words.split()), BenchSettings))

    ours = parsed(
        "--dataset-name demo --max-concurrency 4 --output-file o.jsonl --request-rate 2.5 --seed 7 "
        "--num-prompts 9"
    )
    assert (ours.dataset, ours.levels, ours.output_file) == (("demo",), (4,), "o.jsonl")
    assert (ours.request_rate, ours.seed, ours.num_prompts) == (2.5, 7, 9)
    unpaced = parsed("--request-rate inf")
    assert unpaced.request_rate is None and unpaced.levels == (1, 8, 16)
    # It is the arrivals that limit the number of clients.
    paced = settings_for(request_rate=3.0)
    assert paced.levels == (paced.num_prompts,)


def test_servers_get_the_ports_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sglang_dflash.bench.arms.Server", Started)
    monkeypatch.setattr(Started, "made", [])
    with opened(arms(), port=31000), opened(arms()):
        assert [server.asked_port for server in Started.made] == [31000, 31001, None, None]


def test_simulation_reaches_arms_that_draft_and_weights_of_given_pairs() -> None:
    kinds = ("ar", *BLOCK_ARMS)

    def served(**asked: Any) -> dict[str, tuple[bool, bool]]:
        pair = {} if "pair" in asked else {"target": "T", "draft": "D"}
        of = arms(True, **pair, arms=kinds, **asked)
        return {
            name: (bool(started(of, name).env), "dummy" in started(of, name).args()) for name in of
        }

    drafting = dict.fromkeys(BLOCK_ARMS, (True, True))
    assert served(simulated_acceptance=3.5) == {"ar": (False, True), **drafting}
    with_weights = {"ar": (False, False), **dict.fromkeys(BLOCK_ARMS, (True, False))}
    assert served(simulated_acceptance=3.5, pair="hybrid") == with_weights
    chosen = ("--load-format=auto",)
    assert served(simulated_acceptance=3.5, server_flags=chosen) == with_weights
    assert served() == dict.fromkeys(kinds, (False, False))


def test_a_simulation_in_the_environment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_SIMULATE_ACC_LEN", "5")
    with pytest.raises(ConfigError) as refused:
        arms()
    assert (refused.value.field, refused.value.value) == ("SGLANG_SIMULATE_ACC_LEN", "5")


def test_defaults_depend_on_the_machine() -> None:
    cpu, gpu = settings_for(False), settings_for(True)
    assert (cpu.levels, cpu.kinds, cpu.datasets) == (
        (1, 8, 16),
        ("ar", "dflash"),
        ("demo", "stdlib"),
    )
    assert (gpu.levels, gpu.num_prompts, gpu.max_new_tokens) == ((1, 8, 16, 32), 128, 1024)
    assert cpu.dtype == gpu.dtype == "float32" and not gpu.in_turn
    given_pair = settings_for(False, target="T", draft="D")
    assert given_pair.datasets == ("stdlib",) and not given_pair.in_turn
    assert settings_for(pair="code").datasets == ("unseen",)


def test_running_servers_are_arms_by_their_url() -> None:
    of = settings_for(True, base_url=("vllm=http://x:1", "own=http://y:2/v1"), pair="hybrid")
    assert arms_of(of, accelerator=True) == {"vllm": "http://x:1", "own": "http://y:2/v1"}
    assert of.embedded == "hybrid" and of.datasets == ("demo", "stdlib")
    assert of.dtype == "bfloat16" and not of.in_turn


URL = ("a=http://x",)


@pytest.mark.parametrize(
    "asked, field, value",
    [
        ({"arms": ("ar", "ar")}, "arms", ("ar", "ar")),
        ({"concurrency": "1,x"}, "concurrency", "1,x"),
        ({"concurrency": "8,8"}, "concurrency", "8,8"),
        ({"concurrency": "64"}, "concurrency", 64),
        ({"num_prompts": 0}, "num_prompts", 0),
        ({"max_new_tokens": -1}, "max_new_tokens", -1),
        ({"rounds": 0}, "rounds", 0),
        ({"dataset": ("gsm8l",), "arms": ("ngram",), "pair": "sparse"}, "dataset", "gsm8l"),
        ({"request_rate": 0.0}, "request_rate", 0.0),
        ({"request_rate": math.nan}, "request_rate", math.nan),
        ({"seed": -1}, "seed", -1),
        ({"port": 65536}, "port", 65536),
        ({"port": 30000, "base_url": URL}, "port", 30000),
        ({"block_size": (1,)}, "block_size", 1),
        ({"block_size": (8, 8)}, "block_size", (8, 8)),
        ({"simulated_acceptance": 0.5}, "simulated_acceptance", 0.5),
        ({"simulated_acceptance": math.nan}, "simulated_acceptance", math.nan),
        ({"simulated_acceptance": math.inf}, "simulated_acceptance", math.inf),
        ({"simulated_acceptance": 4.5, "block_size": (8, 4)}, "simulated_acceptance", 4.5),
        ({"simulated_acceptance": 9.0}, "simulated_acceptance", 9.0),
        ({"simulated_acceptance": 2.0, "base_url": URL}, "simulated_acceptance", 2.0),
        ({"simulated_acceptance": 2.0, "arms": ("ar", "ngram")}, "arms", "ngram"),
        ({"simulated_acceptance": 2.0, "arms": ("ar",)}, "simulated_acceptance", 2.0),
        ({"simulated_acceptance": 2.0, "ignore_eos": False}, "ignore_eos", False),
        ({"target": "T"}, "draft", None),
        ({"pair": "dense", "target": "T", "draft": "D"}, "pair", "dense"),
        ({"base_url": ("http://x",)}, "base_url", "http://x"),
        ({"base_url": URL * 2}, "base_url", URL * 2),
        ({"base_url": URL, "arms": ("ar",)}, "arms", ("ar",)),
        ({"base_url": URL, "server_flags": ("--x",)}, "server_flags", ("--x",)),
        ({"dataset": ("demo",), "dataset_file": "x"}, "dataset_file", "x"),
        ({"arms": ("ngram",)}, "arms", "ngram"),
    ],
    ids=str,
)
def test_bad_input_is_refused_by_name(asked: dict[str, Any], field: str, value: object) -> None:
    with pytest.raises(ConfigError) as refused:
        settings = settings_for(**asked)
        arms_of(settings, False)
        load_prompts(settings)
    assert refused.value.field == field
    assert refused.value.value is value or refused.value.value == value


@pytest.mark.parametrize(
    "asked, message",
    [
        (
            ["--dataset-name", "MT_Bench"],
            "--dataset: 'MT_Bench'; did you mean mt-bench? choose from demo, unseen",
        ),
        (
            ["--simulated-acceptance", "2", "--arm", "ar"],
            "--simulated-acceptance: 2.0; none of --arm",
        ),
        (["--base-url", "a=http://x", "--", "-x"], "flags after --: ('-x',); is for servers"),
        (["--thinking", "on"], "--thinking: 'on'; none of demo, stdlib"),
        (["--base-url", "a=http://127.0.0.1:9"], "http://127.0.0.1:9: neither SGLang nor"),
    ],
    ids=str,
)
def test_errors_have_the_commands_words(
    asked: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", "--out", str(tmp_path), *asked]) == 1
    shown = capsys.readouterr()
    assert not shown.out and shown.err.splitlines()[-1].startswith(f"sglang-dflash: {message}")
