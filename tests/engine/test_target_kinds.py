"""Kinds of targets, as tiny random ones: answers with drafts are plain decoding's, and plain
decoding's are those of Transformers.

Prompts are prefilled in chunks, later ones find a prefix cached, and an oracle's drafts are
accepted from none to all of a block. Recurrent Qwen targets are in test_exactness.py in the same
way. docs/models.md has the table.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from sglang_dflash.bench.server import Server
from tests.engine import checks, workload
from tests.engine import servers as s
from tests.engine.checks import Seen
from tests.engine.comparison import Row, cases, compare
from tests.engine.servers import FILES, Ask, ServerConfig
from tests.engine.session import ServerSession
from tests.engine.target_kinds import KINDS

# The others are in the tier `long`.
ORDINARY: tuple[str, ...] = ()
CHUNK = 64
PLAIN = s.OVERLAPPED.having(
    dtype="float32",
    max_total_tokens=16384,
    max_running_requests=8,
    chunked_prefill_size=CHUNK,
)
# A token leads by as much if rounding cannot choose another one (see CLEAR in test_hybrid.py).
CLEAR = 6e-5


def plain_of(name: str) -> ServerConfig:
    config = PLAIN.named(f"{name}-plain").having(model_path=f"{FILES}/target-{name}")
    if KINDS[name].is_recurrent:
        config = config.having(max_mamba_cache_size=64, mamba_track_interval=CHUNK)
    return config


def dflash_of(name: str) -> ServerConfig:
    plain = plain_of(name)
    config = plain.named(name).having(
        **s.drafting(f"{FILES}/hybrid-draft"),
        speculative_dflash_extension="tests.engine.oracle:of_any_target",
    )
    oracle = s.recording_name(plain, workload.hybrid_answers)
    return config.with_env(SHOWN=s.shown_states(config), ORACLE=f"{FILES}/{oracle}")


def in_chunks(seen: Seen) -> None:
    """Prompts took several prefills, and many began behind a prefix that was found."""
    infos = [answer["meta_info"] for answer in checks.answers_of(seen.ours)]
    assert sum(info["prompt_tokens"] - info["cached_tokens"] > 2 * CHUNK for info in infos) >= 10
    assert sum(info["cached_tokens"] > CHUNK for info in infos) >= 10


def prefixes_found(seen: Seen) -> None:
    """Prefix hits cover as many tokens as in plain decoding; in a chat one more, an answer's last
    one."""
    for kind, ours in seen.ours.items():
        got, expected = map(checks.cached_tokens, (ours, seen.theirs[kind]))
        assert {one - other for one, other in zip(got, expected, strict=True)} <= {0, 1}


TABLE = [
    Row(
        dflash_of(name),
        plain_of(name),
        (workload.hybrid_answers,),
        (checks.drafted, checks.lengths_mixed, in_chunks, prefixes_found),
        long=() if name in ORDINARY else (workload.hybrid_answers,),
    )
    for name in KINDS
]


@pytest.mark.parametrize(("config", "row", "ask"), cases(TABLE))
def test_answers_are_plain_decodings(
    config: ServerConfig, row: Row, ask: Ask, answers: Any, server: Server, servers: ServerSession
) -> None:
    compare(row, ask, answers, server, servers)


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(row.plain, marks=[pytest.mark.long] * bool(row.long), id=str(row.plain))
        for row in TABLE
    ],
)
def test_plain_decoding_is_that_of_transformers(
    config: ServerConfig, answers: Any, servers: ServerSession
) -> None:
    """Every token is the likeliest one, or so near to it that rounding may choose."""
    from transformers import AutoModelForCausalLM

    checkpoint = servers.path(str(config.flags["--model-path"]))
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    clear = 0
    for answer in itertools.chain(*answers(config, workload.hybrid_answers).values()):
        prompt, tokens = answer["prompt"], torch.tensor(answer["output_ids"])
        with torch.no_grad():
            logits = model(torch.tensor([prompt + answer["output_ids"]])).logits
        logits = logits[0, len(prompt) - 1 : -1]
        best, second = logits.topk(2).values.unbind(-1)
        taken = logits.gather(1, tokens[:, None])[:, 0]
        assert (best - taken).max() <= CLEAR
        clear += int((best - second > CLEAR).sum())
    assert clear > 2000
