"""Kinds of targets, as tiny random ones: answers with drafts are plain decoding's, and plain
decoding's are those of Transformers.

Prompts are prefilled in chunks, later ones find a prefix cached, and an oracle's drafts are
accepted from none to all of a block. Recurrent Qwen targets without chunks are in
test_exactness.py. docs/models.md has the table.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import requests
import torch

from sglang_dflash.tools.bench.server import Server
from tests.engine import checks, workload
from tests.engine import servers as s
from tests.engine.checks import Check, Seen
from tests.engine.comparison import Row, cases, compare
from tests.engine.servers import FILES, Ask, ServerConfig
from tests.engine.session import ServerSession
from tests.engine.target_kinds import KINDS

pytestmark = pytest.mark.long
# A kind, and the folder of its checkpoint.
TARGETS = {kind: f"target-{kind}" for kind in KINDS} | {
    "qwen3-next": "hybrid-next",
    "qwen3.5-moe": "hybrid-moe",
    "kimi-k2.5": "kimi",
}
# Kinds whose answers must be another's, by their weights.
SAME = {"kimi-k2.5": "deepseek-v3"}
# Those that keep states for the prefix cache, and what rejected tokens are taken back by.
ROLLBACKS = {"lfm2": "snapshot", "qwen3-next": "replay", "qwen3.5-moe": "replay"}
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
    config = PLAIN.named(f"{name}-plain").having(model_path=f"{FILES}/{TARGETS[name]}")
    if name in ROLLBACKS:
        config = config.having(max_mamba_cache_size=64, mamba_track_interval=CHUNK)
    return config


def reference_of(name: str) -> ServerConfig:
    return plain_of(SAME.get(name, name))


def dflash_of(name: str) -> ServerConfig:
    config = (
        plain_of(name)
        .named(name)
        .having(
            **s.drafting(f"{FILES}/hybrid-draft"),
            speculative_dflash_extension="tests.engine.oracle:of_any_target",
        )
    )
    oracle = s.recording_name(reference_of(name), workload.hybrid_answers_in_chunks)
    return config.with_env(SHOWN=s.shown_states(config), ORACLE=f"{FILES}/{oracle}")


def in_chunks(prompts: int) -> Check:
    """So many prompts, or more, took three prefills or more."""

    def check(seen: Seen) -> None:
        # SGLang turns chunks off for some classes with images.
        settings = requests.get(f"{seen.server.url}/server_info", timeout=60).json()
        assert settings["chunked_prefill_size"] == CHUNK
        infos = [answer["meta_info"] for answer in checks.answers_of(seen.ours)]
        several = [info["prompt_tokens"] - info["cached_tokens"] > 2 * CHUNK for info in infos]
        assert sum(several) >= prompts

    return check


def prefixes_found(seen: Seen) -> None:
    """Many prompts began behind a prefix that was found. Prefix hits cover as many tokens as in
    plain decoding; in a chat one more, an answer's last one, unless SGLang keeps states at every
    64th token (those of short convolutions it keeps where answers end)."""
    got, expected = (checks.cached_tokens(every["prefixes"]) for every in (seen.ours, seen.theirs))
    more = {ours - plain for ours, plain in zip(got, expected, strict=True)}
    assert more <= ({0} if ROLLBACKS.get(str(seen.config)) == "replay" else {0, 1})
    assert sum(found >= CHUNK for found in got) >= len(got) / 2


# The pair with a vision tower, and what its draft knows.
SEEING = Row(
    s.HYBRID_PAIR_DFLASH.named("hybrid-pair-chunks").having(chunked_prefill_size=CHUNK),
    s.HYBRID_PAIR_PLAIN,
    (workload.run_pair, workload.pictures),
    (checks.drafted, checks.rolls_back_by("replay"), in_chunks(8)),
)
TABLE = [
    *(
        Row(
            dflash_of(name),
            reference_of(name),
            (workload.hybrid_answers_in_chunks,),
            (
                checks.drafted,
                checks.lengths_mixed,
                checks.rolls_back_by(ROLLBACKS.get(name)),
                in_chunks(10),
                prefixes_found,
            ),
        )
        for name in TARGETS
    ),
    SEEING,
]


@pytest.mark.parametrize(("config", "row", "ask"), cases(TABLE))
def test_answers_are_plain_decodings(
    config: ServerConfig, row: Row, ask: Ask, answers: Any, server: Server, servers: ServerSession
) -> None:
    compare(row, ask, answers, server, servers)


@pytest.mark.parametrize(
    "config", [plain_of(name) for name in TARGETS if name not in SAME], ids=str
)
def test_plain_decoding_is_that_of_transformers(
    config: ServerConfig, answers: Any, servers: ServerSession
) -> None:
    """Every token is the likeliest one, or so near to it that rounding may choose."""
    from transformers import AutoModelForCausalLM

    checkpoint = servers.path(str(config.flags["--model-path"]))
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    clear = 0
    for answer in itertools.chain(*answers(config, workload.hybrid_answers_in_chunks).values()):
        prompt, tokens = answer["prompt"], torch.tensor(answer["output_ids"])
        with torch.no_grad():
            logits = model(torch.tensor([prompt + answer["output_ids"]])).logits
        logits = logits[0, len(prompt) - 1 : -1]
        best, second = logits.topk(2).values.unbind(-1)
        taken = logits.gather(1, tokens[:, None])[:, 0]
        assert (best - taken).max() <= CLEAR
        clear += int((best - second > CLEAR).sum())
    assert clear > 2000
