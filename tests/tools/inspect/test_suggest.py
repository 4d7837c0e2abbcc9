"""`inspect --context`: the most requests at a time, and the launch command for them."""

from __future__ import annotations

import argparse
import re
import shlex
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from sglang_dflash.checkpoint.published import look_up
from sglang_dflash.common.command_line import given
from sglang_dflash.common.errors import ConfigError
from sglang_dflash.drafting.options import Options
from sglang_dflash.tools.cli.inspect import arguments
from sglang_dflash.tools.inspect import launch_command
from sglang_dflash.tools.inspect.report import inspect
from sglang_dflash.tools.inspect.serving import Serving
from sglang_dflash.tools.inspect.suggest import AS_ASKED, Pair, command_of, most, suggest
from sglang_dflash.tools.inspect.table import as_table
from tests.tools.inspect.pairs import inspected, refusal

PAIRS = (
    ("Qwen/Qwen3-8B", "z-lab/Qwen3-8B-DFlash-b16"),
    ("Qwen/Qwen3-4B", "z-lab/Qwen3-4B-DFlash-b16"),
    ("Qwen/Qwen3.5-9B", "z-lab/Qwen3.5-9B-DFlash"),
    ("Qwen/Qwen3.5-27B", "z-lab/Qwen3.5-27B-DFlash"),
    ("Qwen/Qwen3.6-27B", "z-lab/Qwen3.6-27B-DFlash"),
    ("Qwen/Qwen3.8-27B", "z-lab/Qwen3.8-27B-DFlash2"),
    ("Qwen/Qwen3.6-35B-A3B", "z-lab/Qwen3.6-35B-A3B-DFlash"),
    ("Qwen/Qwen3.5-122B-A10B", "z-lab/Qwen3.5-122B-A10B-DFlash"),  # on four GPUs
    ("openai/gpt-oss-20b", "z-lab/gpt-oss-20b-DFlash"),
    ("Qwen/Qwen3-Coder-Next", "z-lab/Qwen3-Coder-Next-DFlash"),
)
CARDS, CONTEXTS = (80, 96, 140, 180), (32768, 65536, 131072)


def asked(target: str, draft: str, **settings: Any) -> Pair:
    facts = look_up("target", target, offline=True), look_up("draft", draft, offline=True)
    return Pair(*facts, Options(), Serving(**settings), None)


def at_a_time(pair: Pair, command: str) -> int:
    """Requests of the pair's length that the launch command runs; 0 if it is refused."""
    read = launch_command.read(shlex.split(command))
    assert not read.not_reckoned
    parser = argparse.ArgumentParser()
    arguments(parser)
    args = parser.parse_args(read.words)
    serving = Serving(**given(args, Serving))
    machine = {name: getattr(pair.serving, name) for name in ("memory_gib", "context")}
    try:
        found = inspect(
            pair.target, pair.draft, Options(**given(args, Options)), replace(serving, **machine)
        )
    except ConfigError:
        return 0
    return int(found["requests_at_context"])


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair[0].split("/")[1])
def test_a_suggested_command_runs_as_many_and_no_more(pair: tuple[str, str]) -> None:
    shown = 0
    for gib, context in product(CARDS, CONTEXTS):
        figures = {"memory_gib": float(gib), "context": context, "context_length": context}
        wanted = asked(*pair, **figures, tp_size=4 if "122B" in pair[0] else 1)
        whole = (gib, context) == (96, 65536)
        rows = suggest(wanted)["set_ups"] if whole else []
        count = most(wanted, AS_ASKED)
        command = command_of(wanted, AS_ASKED, count)
        for row in [*rows, *([{"sessions": count, "command": command}] if count else [])]:
            shown += 1
            count, command = row["sessions"], row["command"]
            assert at_a_time(wanted, command) == count
            more = re.sub(
                r"(--max-running-requests|--max-mamba-cache-size) (\d+)",
                lambda found, n=count: f"{found[1]} {int(found[2]) // n * (n + 1)}",
                command,
            )
            assert at_a_time(wanted, more) <= count
    assert shown >= len(CARDS)


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair[0].split("/")[1])
def test_other_numbers_of_requests_run_no_more(pair: tuple[str, str]) -> None:
    figures = {"memory_gib": 140.0, "context": 65536, "context_length": 65536, "tp_size": 4}
    wanted = asked(*pair, **figures)
    best = most(wanted, AS_ASKED)
    assert best
    for requests in (best, best + 1, 48, 96):
        serving = replace(wanted.serving, max_running_requests=requests)
        found = inspect(wanted.target, wanted.draft, wanted.options, serving)
        assert found["requests_at_context"] <= best


def test_the_most_on_an_h200() -> None:
    """The claim of README."""
    wanted = asked(
        "Qwen/Qwen3.6-35B-A3B", "z-lab/Qwen3.6-35B-A3B-DFlash", memory_gib=140.0, context=65536
    )
    found = suggest(wanted)["most"]
    assert found == {"as served": 31, "SGLang's worker": 14, "without a draft": 39}


def test_what_fits_where_the_card_is_too_small(capsys: pytest.CaptureFixture[str]) -> None:
    pair = ("Qwen/Qwen3.6-35B-A3B", "z-lab/Qwen3.6-35B-A3B-DFlash")
    command = [*pair, "--offline", "--context", "49152", "--sessions"]
    found = inspected(capsys, *command, "24", status=1)["suggestions"]
    assert found["command"] is None
    costs = {row["flags"]: row["sessions"] for row in found["set_ups"]}
    assert list(costs) == ["--quantization fp8", "--tp-size 2"] and min(costs.values()) >= 24
    fits = inspected(capsys, *command, "2")["suggestions"]
    assert "--max-running-requests 2 " in fits["command"] and not fits["set_ups"]
    none = inspected(capsys, *command, "4000", status=1)
    assert "no set-up that is known here runs as many" in as_table(none)
    # In words: whether they fit, and the whole command of a set-up in which they do.
    for sessions, status, verdict, shown in (
        ("2", 0, "they fit, with the launch command below", "--max-running-requests 2 "),
        ("24", 1, "they do not fit, 3 do;", "--quantization fp8 --max-running-requests 24 "),
    ):
        report = inspected(capsys, *command, sessions, status=status)
        text = " ".join(as_table(report).split())
        assert f"{sessions} requests at a time, as asked for: {verdict}" in text
        assert shown in text.partition("launch command")[2].replace("\\ ", "")


def test_inspect_reads_the_flags_of_servers(capsys: pytest.CaptureFixture[str]) -> None:
    """A set-up's flags can be added to the command that printed them."""
    pair = ("Qwen/Qwen3.5-27B", "z-lab/Qwen3.5-27B-DFlash", "--offline", "--context", "32768")
    for ours, server in (
        ("--kv-dtype fp8_e4m3", "--kv-cache-dtype fp8_e4m3"),
        ("--draft-kv-dtype bfloat16", "--speculative-draft-kv-cache-dtype bf16"),
        ("--window 2048", "--speculative-draft-window-size 2048"),
        ("--block-size 8 --mem-fraction 0.8", "--speculative-num-draft-tokens 8 "
         "--mem-fraction-static 0.8"),
    ):  # fmt: skip
        assert inspected(capsys, *pair, *ours.split()) == inspected(capsys, *pair, *server.split())
    for row in inspected(capsys, *pair)["suggestions"]["set_ups"]:
        found = inspected(capsys, *pair, *row["flags"].split())["suggestions"]
        assert found["most"]["as served"] == row["sessions"]
        # The order of flags may differ.
        assert sorted(found["command"].split()) == sorted(row["command"].split())


def test_a_suggestion_keeps_what_was_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    pair = ("Qwen/Qwen3.5-27B", "z-lab/Qwen3.5-27B-DFlash", "--offline", "--context", "32768")
    flags = "--tp-size 2 --kv-dtype fp8_e4m3 --window 2048 --mem-fraction 0.85 --lookup"
    found = inspected(capsys, *pair, *flags.split())
    for words in (
        "--tp-size 2", "--kv-cache-dtype fp8_e4m3", "--speculative-draft-window-size 2048",
        "--mem-fraction-static 0.85", "--speculative-dflash-lookup on",
    ):  # fmt: skip
        assert words in found["suggestions"]["command"]
    builtin = inspected(
        capsys, "--offline", "--context", "32768", "--", "--model-path", pair[0],
        "--speculative-draft-model-path", pair[1], "--speculative-algorithm", "DFLASH",
        "--speculative-dflash-worker", "builtin",
    )  # fmt: skip
    assert "--speculative-dflash-worker builtin" in builtin["suggestions"]["command"]
    assert max(map(len, as_table(found).splitlines())) <= 80
    others = [
        "--trust-remote-code", "--no-ple-offload-embedding", "--dtype", "float32",
        "--served-model-name", "my model", "--fp8-gemm-backend", "triton",
        "--default-chat-template-kwargs", '{"enable_thinking": false}',
        "--lora-paths", "a=b", "c=d",
    ]  # fmt: skip
    pasted = inspected(
        capsys, "--offline", "--context", "32768", "--", "sglang", "serve", "--model-path", pair[0],
        "--speculative-algorithm", "DFLASH", *others,
    )  # fmt: skip
    command = shlex.split(pasted["suggestions"]["command"])
    assert command[-len(others) :] == others
    assert launch_command.read(command).others == others
    # What most readers came for is not behind the facts.
    (best,) = (line for line in as_table(found).splitlines()[:10] if line.startswith("  at most"))
    assert list(map(int, best.split()[3:])) == list(found["suggestions"]["most"].values())


def test_an_earlier_revision_is_served_by_its_commit(capsys: pytest.CaptureFixture[str]) -> None:
    """The name with an @ is ours, and no repository's."""
    pair = ("Qwen/Qwen3.5-27B", "z-lab/Qwen3.5-27B-DFlash@5-layers")
    found = inspected(capsys, *pair, "--context", "65536", "--memory-gib", "140")
    command = found["suggestions"]["command"]
    draft = "--speculative-draft-model-path z-lab/Qwen3.5-27B-DFlash "
    assert f"{draft}--speculative-draft-model-revision COMMIT " in command
    (warned,) = [text for text in found["warnings"] if "COMMIT" in text]
    assert f"{pair[1]} is an earlier revision of z-lab/Qwen3.5-27B-DFlash" in warned
    # The facts are of one revision, whichever a command names.
    read = launch_command.read([*shlex.split(command), "--revision", "main"])
    revisions = ["--speculative-draft-model-revision COMMIT", "--revision main"]
    assert read.not_reckoned == revisions


def test_sessions_without_a_length_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    pair = ("Qwen/Qwen3.5-27B", "z-lab/Qwen3.5-27B-DFlash", "--offline")
    assert "--sessions: 3; needs --context" in refusal(capsys, *pair, "--sessions", "3")
    quantized = ("Qwen/Qwen3.5-27B", "z-lab/Qwen3.5-27B-DFlash", "--quantization", "fp8")
    assert inspected(capsys, *quantized)["target_weight_bytes"] < 33 * 2**30
    states = inspected(capsys, *pair, "--max-mamba-cache-size", "100")
    assert states["recurrent_slots"] == 100 and states["running_requests"] == 20
