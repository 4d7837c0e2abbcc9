"""Arms, settings and refusals of `sglang-dflash bench`."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from sglang_dflash import cli
from sglang_dflash.bench.arms import Arm, arms_of, opened
from sglang_dflash.bench.server_config import ServerConfig
from sglang_dflash.bench.settings import BLOCK_KINDS, ON_CPU, Settings
from sglang_dflash.cli import bench
from sglang_dflash.facts.errors import ConfigError
from tests.bench.fake_server import Started


def started(arm: Arm) -> ServerConfig:
    assert isinstance(arm.server, ServerConfig)
    return arm.server


def args(arm: Arm) -> list[str]:
    return started(arm).args()


def test_arms_and_their_flags() -> None:
    asked = Settings(
        arm=("ar", "builtin", "dflash"),
        block_size=(4, 8),
        server_flags=("--page-size", "16"),
        concurrency="1,32",
    )
    arms = {arm.name: args(arm) for arm in arms_of(asked.resolve(False), accelerator=False)}
    assert list(arms) == ["ar", "builtin@4", "builtin@8", "dflash@4", "dflash@8"]
    assert (
        "--speculative-algorithm" not in arms["ar"]
        and "--speculative-dflash-worker" not in arms["dflash@4"]
    )
    at = arms["builtin@4"].index("--speculative-dflash-worker")
    assert arms["builtin@4"][at + 1] == "builtin" and arms["dflash@8"][-4:] == [
        "--speculative-num-draft-tokens",
        "8",
        "--page-size",
        "16",
    ]
    own = Settings(target="T", draft="D", arm=("ngram", "dflash"), dtype="bfloat16").resolve(True)
    assert own.in_turn and own.levels == (1, 8, 16, 32)
    ngram, dflash = (args(arm) for arm in arms_of(own, accelerator=True))
    assert (
        ngram[-2:] == ["--speculative-algorithm", "NGRAM"]
        and dflash[dflash.index("--speculative-draft-model-path") + 1] == "D"
    )
    assert dflash[:2] == ["--model-path", "T"] and dflash[dflash.index("--dtype") + 1] == "bfloat16"
    with pytest.raises(ConfigError, match="--arm: 'ngram' needs SGLang's compiled kernels"):
        arms_of(own, accelerator=False)


def test_arms_without_overlap_differ_from_theirs_by_one_flag() -> None:
    kinds = ("ar", "dflash", "builtin")
    asked = Settings(arm=tuple(one for kind in kinds for one in (kind, f"{kind}-no-overlap")))
    arms = {arm.name: started(arm).flags for arm in arms_of(asked.resolve(False), False)}
    for kind in kinds:
        without = dict(arms[f"{kind}-no-overlap"])
        assert without.pop("--disable-overlap-schedule") is True and without == arms[kind]
    sizes = Settings(arm=("ar-no-overlap", "dflash-no-overlap"), block_size=(4,)).resolve(False)
    assert [arm.name for arm in arms_of(sizes, False)] == ["ar-no-overlap", "dflash-no-overlap@4"]


def test_sglangs_flag_names_are_taken() -> None:
    parser = argparse.ArgumentParser()
    bench.arguments(parser)
    theirs = (
        "--dataset-name demo --max-concurrency 4 --output-file o.jsonl --request-rate 2.5 --seed 7 "
        "--num-prompts 9"
    )
    ours = Settings.of(vars(parser.parse_args(theirs.split()))).resolve(False)
    assert (ours.dataset, ours.levels, ours.output_file) == (("demo",), (4,), Path("o.jsonl"))
    assert (ours.request_rate, ours.seed, ours.num_prompts) == (2.5, 7, 9)
    unpaced = Settings.of(vars(parser.parse_args(["--request-rate", "inf"]))).resolve(False)
    assert unpaced.request_rate is None and unpaced.levels == (1, 8, 16)
    # It is the arrivals that limit the number of clients.
    assert Settings(request_rate=3.0).resolve(False).levels == (ON_CPU.num_prompts,)


def test_servers_get_the_ports_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sglang_dflash.bench.arms.Server", Started)
    monkeypatch.setattr(Started, "made", [])
    with opened(arms_of(Settings().resolve(False), False), port=31000):
        assert [server.asked_port for server in Started.made] == [31000, 31001]
    with opened(arms_of(Settings().resolve(False), False)):
        assert [server.asked_port for server in Started.made[2:]] == [None, None]


def test_simulation_reaches_arms_that_draft_and_weights_of_given_pairs() -> None:
    def served(
        *, model: str | None = None, simulated: float | None = 3.5, theirs: tuple[str, ...] = ()
    ) -> dict[str, tuple[bool, bool]]:
        pair = {"model": model} if model else {"target": "T", "draft": "D"}
        asked = Settings(
            **pair,
            arm=("ar", *BLOCK_KINDS),
            simulated_acceptance=simulated,
            server_flags=theirs,
        )
        return {
            arm.name: (bool(started(arm).env), "dummy" in args(arm))
            for arm in arms_of(asked.resolve(True), accelerator=True)
        }

    assert served() == {"ar": (False, True), **dict.fromkeys(BLOCK_KINDS, (True, True))}
    with_weights = {"ar": (False, False), **dict.fromkeys(BLOCK_KINDS, (True, False))}
    assert (
        served(model="hybrid") == with_weights
        and served(theirs=("--load-format=auto",)) == with_weights
    )
    assert served(simulated=None) == dict.fromkeys(("ar", *BLOCK_KINDS), (False, False))


def test_a_simulation_in_the_environment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_SIMULATE_ACC_LEN", "5")
    with pytest.raises(
        ConfigError, match="SGLANG_SIMULATE_ACC_LEN: '5' would reach every server unseen"
    ):
        arms_of(Settings().resolve(False), accelerator=False)


def test_defaults_depend_on_the_machine() -> None:
    assert (ON_CPU.concurrency, Settings().resolve(False).arm) == ("1,8,16", ("ar", "dflash"))
    assert Settings().resolve(False).dtype == Settings().resolve(True).dtype == "float32"
    assert Settings(target="T", draft="D").resolve(True).dtype == "bfloat16"
    assert Settings(target="T", draft="D").resolve(False).dataset == ("stdlib",)
    assert not Settings(target="T", draft="D").resolve(False).in_turn


@pytest.mark.parametrize(
    "asked, message",
    [
        (["--arm", "magic"], "--arm: 'magic'; choose from ar, ar-no-overlap"),
        (["--arm", "ar", "--arm", "ar"], "--arm: ar, ar; every name once"),
        (["--concurrency", "1,x"], "--concurrency: '1,x'"),
        (["--concurrency", "8,8"], "--concurrency: '8,8'"),
        (["--concurrency", "64"], "--concurrency: 64 clients, but demo has 16 prompts"),
        (["--num-prompts", "0"], "--num-prompts: 0"),
        (["--max-new-tokens", "-1"], "--max-new-tokens: -1"),
        (["--rounds", "0"], "--rounds: 0"),
        # Before anything else is looked at.
        (
            ["--dataset", "gsm8l", "--arm", "ngram", "--model", "sparse"],
            "--dataset: 'gsm8l'; did you mean gsm8k? choose from demo, unseen",
        ),
        (["--dataset-name", "MT_Bench"], "--dataset: 'MT_Bench'; did you mean mt-bench?"),
        (["--request-rate", "0"], "--request-rate: 0"),
        (["--request-rate", "nan"], "--request-rate: nan"),
        (["--seed", "-1"], "--seed: -1"),
        (["--port", "65536"], "--port: 65536"),
        (
            ["--port", "30000", "--base-url", "a=http://x"],
            "--port: 30000 is for servers that are started here",
        ),
        (["--block-size", "1"], "--block-size: 1;"),
        (["--block-size", "8", "--block-size", "8"], "--block-size: 8, 8; every size once"),
        (
            ["--simulated-acceptance", "0.5"],
            "--simulated-acceptance: 0.5; a verify step commits 1 token or more",
        ),
        (
            ["--simulated-acceptance", "nan"],
            "--simulated-acceptance: nan; a verify step commits 1 token or more",
        ),
        (
            ["--simulated-acceptance", "inf"],
            "--simulated-acceptance: inf; a verify step commits 1 token or more",
        ),
        (
            ["--simulated-acceptance", "4.5", "--block-size", "8", "--block-size", "4"],
            "--simulated-acceptance: 4.5; a verify step of block size 4 commits at most 4 tokens",
        ),
        (
            ["--simulated-acceptance", "9"],
            "--simulated-acceptance: 9; a verify step of block size 8 commits at most 8 tokens",
        ),
        (
            ["--simulated-acceptance", "2", "--base-url", "a=http://x"],
            "--simulated-acceptance: 2.0 is for servers that are started here",
        ),
        (
            ["--simulated-acceptance", "2", "--arm", "ar", "--arm", "ngram"],
            "--arm: 'ngram' drafts trees, and SGLang simulates chains only",
        ),
        (
            ["--simulated-acceptance", "2", "--arm", "ar"],
            "--simulated-acceptance: 2, but none of ar drafts; add --arm dflash or builtin",
        ),
        (
            ["--simulated-acceptance", "2", "--no-ignore-eos"],
            "--no-ignore-eos: with --simulated-acceptance an end means nothing",
        ),
        (["--model", "sparse"], "demo model: 'sparse'"),
        (["--target", "T"], "--target and --draft: one without the other"),
        (["--model", "dense", "--target", "T", "--draft", "D"], "--model: 'dense'"),
        (["--base-url", "http://x"], "--base-url: 'http://x'; NAME=URL"),
        (
            ["--base-url", "a=http://x", "--arm", "ar"],
            "--arm: ('ar',) is for servers that are started here",
        ),
        (
            ["--base-url", "a=http://x", "--", "--page-size", "1"],
            "flags after --: ('--page-size', '1')",
        ),
        (
            ["--dataset", "demo", "--dataset-file", "x"],
            "--dataset-file: 'x' replaces --dataset",
        ),
        (["--thinking", "on"], "--thinking: 'on', but none of demo, stdlib"),
        (["--arm", "ngram"], "--arm: 'ngram' needs"),
        (["--base-url", "a=http://127.0.0.1:9"], "http://127.0.0.1:9: neither SGLang nor"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_bad_input_is_refused_by_name(
    asked: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", "--out", str(tmp_path), *asked]) == 1
    shown = capsys.readouterr()
    assert not shown.out and shown.err.splitlines()[-1].startswith(f"sglang-dflash: {message}")


def test_running_servers_are_arms_by_their_url() -> None:
    asked = Settings(base_url=("vllm=http://x:1", "own=http://y:2/v1"), model="hybrid")
    resolved = asked.resolve(True)
    assert arms_of(resolved, accelerator=True) == [
        Arm("vllm", "http://x:1"),
        Arm("own", "http://y:2/v1"),
    ]
    assert resolved.model == "hybrid" and resolved.dataset == ("demo", "stdlib")
    assert resolved.dtype == "bfloat16" and not resolved.in_turn
