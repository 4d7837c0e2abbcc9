"""Arms, settings and refusals of `sglang-dflash bench`."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang_dflash import cli
from sglang_dflash.bench.arms import Arm, arms_of
from sglang_dflash.bench.server_config import ServerConfig
from sglang_dflash.bench.settings import BLOCK_KINDS, ON_CPU, Settings
from sglang_dflash.checkpoint.errors import ConfigError


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


def test_simulation_reaches_arms_that_draft_and_weights_of_given_pairs() -> None:
    def served(
        *, model: str | None = None, simulated: float | None = 3.5, theirs: tuple[str, ...] = ()
    ) -> dict[str, tuple[bool, bool]]:
        pair = {"model": model} if model else {"target": "T", "draft": "D"}
        asked = Settings(
            **pair,
            arm=("ar", "dflash", "builtin"),
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
        (["--arm", "magic"], "--arm: 'magic'; choose from ar, dflash"),
        (["--arm", "ar", "--arm", "ar"], "--arm: ar, ar; every name once"),
        (["--concurrency", "1,x"], "--concurrency: '1,x'"),
        (["--concurrency", "8,8"], "--concurrency: '8,8'"),
        (["--concurrency", "64"], "--concurrency: 64 clients, but demo has 16 prompts"),
        (["--num-prompts", "0"], "--num-prompts: 0"),
        (["--max-new-tokens", "-1"], "--max-new-tokens: -1"),
        (["--rounds", "0"], "--rounds: 0"),
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
