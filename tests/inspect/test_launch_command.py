"""`sglang-dflash inspect` reads a server's launch command."""

from __future__ import annotations

import json

import pytest

from sglang_dflash import cli
from sglang_dflash.inspect import launch_command
from tests.inspect.pairs import inspected

TARGET, DRAFT = "Qwen/Qwen3.5-27B", "z-lab/Qwen3.5-27B-DFlash"
COMMAND = (
    f"python -m sglang.launch_server --model-path {TARGET} --speculative-algorithm DFLASH "
    f"--speculative-draft-model-path {DRAFT} --speculative-num-draft-tokens 8 --tp-size=2 "
    "--attention-backend triton --mem-fraction-static 0.75 --mamba-scheduler-strategy extra_buffer "
    "--speculative-dflash-width adaptive --speculative-draft-attention-backend torch_native "
    "--kv-cache-dtype fp8_e4m3 --max-running-requests 8 --context-length 65536 "
    "--speculative-dflash-draft-window-size 4096 --trust-remote-code"
).split()
OURS = (
    f"{TARGET} {DRAFT} --block-size 8 --tp-size 2 --mem-fraction 0.75 --kv-dtype fp8_e4m3 "
    "--max-running-requests 8 --context-length 65536 --window 4096 "
    "--width adaptive --attention-backend triton --draft-attention-backend torch"
).split()


def test_a_pasted_command_gives_the_figures_of_our_flags(
    capsys: pytest.CaptureFixture[str],
) -> None:
    expected = inspected(capsys, *OURS)
    ways = (
        ["--offline", "--json", "--", *COMMAND],
        # Without the program, and its flags directly.
        ["--offline", "--json", "--", *COMMAND[3:]],
        [*COMMAND[3:], "--json", "--offline"],
    )
    for words in ways:
        assert cli.main(["inspect", *words]) == 0
        assert json.loads(capsys.readouterr().out) == expected


def test_flags_that_change_the_figures_and_are_not_reckoned_are_told(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = [*COMMAND, "--dp-size", "2", "--quantization=w8a8_int8"]
    assert cli.main(["inspect", "--offline", "--", *words]) == 0
    told = "warning: not part of the arithmetic: --dp-size 2, --quantization w8a8_int8"
    assert told in capsys.readouterr().out


def test_a_command_without_a_target_or_for_another_algorithm_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for words, message in (
        (["--", "sglang", "serve", "--tp-size", "2"], "flags after --: missing; --model-path"),
        (["--", *COMMAND, "--speculative-algorithm", "EAGLE"], "inspect is about DFLASH"),
    ):
        assert cli.main(["inspect", *words]) == 1
        assert message in capsys.readouterr().err


def test_settings_of_sglangs_worker_are_known(capsys: pytest.CaptureFixture[str]) -> None:
    for flags, reason in (
        ("--pp-size 2", "--pp-size above 1"),
        ("--enable-flexkv", "--enable-flexkv"),
        ("--enable-dp-attention --dp-size 2", "data-parallel attention (--enable-dp-attention)"),
        ("--speculative-dflash-worker builtin", "--speculative-dflash-worker builtin"),
        ("--speculative-draft-model-quantization fp8", "--speculative-draft-model-quantization"),
    ):
        assert cli.main(["inspect", "--offline", "--json", "--", *COMMAND, *flags.split()]) == 0
        found = json.loads(capsys.readouterr().out)
        assert (found["worker"], found["worker_reason"]) == ("builtin", reason)
    assert launch_command.read([*COMMAND, "--pp-size", "1"]).builtin is None


def test_a_draft_attention_backend_that_cannot_serve_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As a server does; SGLang's worker has others."""
    flag = "--speculative-draft-attention-backend"
    words = ["inspect", "--offline", "--", *COMMAND]
    assert cli.main([*words, flag, "fa3"]) == 1
    message = "--draft-attention-backend: 'fa3'; serves draft K/V in bfloat16, float16, not in"
    assert message in capsys.readouterr().err
    assert cli.main([*words, flag, "flashinfer"]) == 0
    assert "served by SGLang's" in capsys.readouterr().out
