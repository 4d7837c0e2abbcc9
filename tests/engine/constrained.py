"""Requests under a grammar or a budget of thoughts: servers, and what they are asked."""

from __future__ import annotations

import json

from sglang_dflash.bench.server import Server
from tests.engine import feature_requests as features
from tests.engine import workload
from tests.engine.client import ask, together
from tests.engine.feature_requests import Answers
from tests.engine.servers import DFLASH_FLAGS, FILES, PLAIN

# A model that thinks no longer than it is allowed to.
THINKING_PLAIN = PLAIN.named("thinking-plain").having(
    model_path=f"{FILES}/thinking", reasoning_parser="qwen3", enable_strict_thinking=True
)
THINKING = THINKING_PLAIN.named("thinking").having(**DFLASH_FLAGS)


def thoughts(server: Server) -> Answers:
    """Of a model that may think for so many tokens, alone and before JSON, all in the same
    batches."""
    limits = [{"max_thinking_tokens": n} for n in (0, 1, 3, 7, 8, 9, 20)] + [{}]
    point = {"json_schema": json.dumps(features.POINT), "ignore_eos": False}
    return together(
        lambda t=t, m=m, k=k: ask(
            server, t, {"require_reasoning": True, **m}, max_new_tokens=60, **k
        )
        for t, m in zip(workload.prompts()["demo"], limits, strict=False)
        for k in ({}, point)
    )
