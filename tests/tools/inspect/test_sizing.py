"""`inspect` sizes a server: the card's memory in parts, and how many long requests run."""

from __future__ import annotations

import json
import re

import pytest

from sglang_dflash.memory.draft_memory import DraftMemory
from sglang_dflash.tools.demo_pairs.pairs import demo_pair
from sglang_dflash.tools.inspect import memory as inspected_memory
from sglang_dflash.tools.inspect.kv import GIB
from sglang_dflash.tools.inspect.table import as_table
from tests.tools.inspect.pairs import inspected, refusal


def test_the_memory_sums_to_that_of_the_card(capsys: pytest.CaptureFixture[str]) -> None:
    """It did not: states stood elsewhere, and what SGLang keeps nowhere."""
    pair = ("Qwen/Qwen3.5-27B", "z-lab/Qwen3.5-27B-DFlash", "--max-running-requests", "8")
    found = inspected(capsys, *pair)
    parts = found["memory_bytes"]
    assert sum(parts.values()) == 80 * GIB and min(parts.values()) > 0
    # A tenth, and less than a token and a ring's entry.
    assert 8 * GIB <= parts["left to SGLang"] < 8.01 * GIB
    assert found["kv_memory_bytes"] - parts["target KV"] - parts["draft KV"] < 1 << 20
    _, _, table = as_table(found).partition("memory of each GPU")
    shown = [float(n) for n in re.findall(r" ([\d.]+)$", table.partition("\n\n")[0], re.M)]
    assert shown[-1] == 80 and round(sum(shown[:-1]), 2) == 80
    assert max(map(len, as_table(found).splitlines())) <= 80


def test_it_tells_how_many_long_requests_run_at_a_time(capsys: pytest.CaptureFixture[str]) -> None:
    pair = ("Qwen/Qwen3.5-27B", "z-lab/Qwen3.5-27B-DFlash", "--max-running-requests", "8")
    names = [f"requests_at_context{which}" for which in ("", "_builtin", "_without_draft")]
    for context, counts, bound in (
        ("20480", [7, 1, 8], "the KV tokens bound it"),
        ("1024", [8, 1, 8], "--max-running-requests bounds it"),
        # A step takes two blocks ahead.
        (str(157_539 // 2), [1, 1, 2], "the KV tokens bound it"),
    ):
        found = inspected(capsys, *pair, "--context", context)
        assert [found[name] for name in names] == counts and bound in found["at_context"]
        assert found["at_context"] in " ".join(as_table(found).split())
        assert ("--sessions 8 tells what runs 8" in found["at_context"]) is (counts[0] < 8)
    of_units, of_tokens = (inspected(capsys, *pair, "--context", n) for n in ("20Ki", "20480"))
    assert of_units == of_tokens
    assert inspected(capsys, *pair)["at_context"] is None
    refused = refusal(capsys, *pair[:2], "--context", "300000")
    assert "up to 262144 tokens (max_position_embeddings of the draft)" in refused
    # A server that extends the target's context, by YaRN.
    dense = ("Qwen/Qwen3-8B", "z-lab/Qwen3-8B-DFlash-b16", "--context", "65536")
    assert "up to 40960 tokens" in refusal(capsys, *dense)
    found = inspected(capsys, *dense, "--context-length", "131072")
    assert [found[name] for name in names] == [5, 5, 6]
    warned = " ".join(found["warnings"])
    assert "contexts of 131072 tokens, the draft was made for 40960" in warned
    small = demo_pair("dense")
    own = json.loads((small.target / "config.json").read_text())["max_position_embeddings"]
    known = inspected(capsys, *map(str, (small.target, small.draft)), "--context-length", "99999")
    assert f"the target's context is {own}; " in " ".join(known["warnings"])
    short = ("--context-length", "8192", "--context", "9000")
    assert "up to 8192 tokens (--context-length)" in refusal(capsys, *pair[:2], *short)


def test_sglangs_worker_beside_ours_is_the_one_that_a_flag_asks_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    target, draft = "Qwen/Qwen3.5-27B", "z-lab/Qwen3.5-27B-DFlash"
    figures = ("target_tokens", "running_requests", "requests_at_context")
    command = ("sglang", "serve", "--model-path", target, "--speculative-draft-model-path", draft)
    own = ("--max-running-requests", "8", "--speculative-algorithm", "DFLASH")
    for gib in ("80", "140"):
        asked = ("--context", "20480", "--memory-gib", gib)
        found = inspected(capsys, target, draft, *asked, *own[:2])
        by_flag = (*command, *own, "--speculative-dflash-worker", "builtin")
        theirs = inspected(capsys, *asked, "--", *by_flag)
        assert [found[f"{name}_builtin"] for name in figures] == [theirs[name] for name in figures]
    # One card that holds the weights, and no request's snapshots.
    small = inspected(capsys, target, draft, "--memory-gib", "64", "--max-running-requests", "1")
    assert small["target_tokens"] > 0 and small["target_tokens_builtin"] == 0
    assert small["target_tokens_gain"] is None


@pytest.mark.parametrize("part", DraftMemory._fields)
def test_the_table_shows_every_part_that_a_server_reserves(
    part: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It told their sum only, without four of them."""
    reserved = DraftMemory(**{part: 3 << 30})
    monkeypatch.setattr(inspected_memory, "draft_memory", lambda *_: reserved)
    found = inspected(capsys, "Qwen/Qwen3.5-27B", "z-lab/Qwen3.5-27B-DFlash")
    assert found["draft_memory_bytes"] == {**reserved._asdict(), "total": 3 << 30}
    assert found["memory_bytes"]["draft steps"] == found["draft_step_bytes"] == 3 << 30
    shown = as_table(found).partition("\ndraft steps\n")[2]
    assert f"3072.0 MiB ({part.replace('_', ' ')} 3072.0)" in " ".join(shown.split())


def test_what_verification_keeps_stands_beside_the_states(
    capsys: pytest.CaptureFixture[str],
) -> None:
    pair = ("Qwen/Qwen3.5-27B", "z-lab/Qwen3.5-27B-DFlash", "--max-running-requests", "8")
    found = inspected(capsys, *pair)
    parts = found["memory_bytes"]
    assert parts["recurrent states"] == (
        (found["recurrent_slots"] + 1) * found["recurrent_state_bytes"]
    )
    assert parts["recurrent rollback"] == (8 + 1) * found["recurrent_replay_bytes"]
