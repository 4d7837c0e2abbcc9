"""Requests under a grammar or a budget of thoughts: servers, and what they are asked."""

from __future__ import annotations

import json

from sglang_dflash.tools.bench.server import Server
from tests.engine import feature_requests as features
from tests.engine import workload
from tests.engine.client import ask, together
from tests.engine.feature_requests import Answers
from tests.engine.servers import DFLASH_FLAGS, FEATURES_DFLASH, FILES, PLAIN

# A model that thinks no longer than it is allowed to, and whose lm_head is quantized.
THINKING_PLAIN = (
    PLAIN.named("thinking-plain")
    .having(model_path=f"{FILES}/thinking", reasoning_parser="qwen3", enable_strict_thinking=True)
    .changed("four_bit_head")
)
THINKING = THINKING_PLAIN.named("thinking").having(**DFLASH_FLAGS)


def thoughts(server: Server) -> Answers:
    """Return answers with a limit on thinking tokens, alone and before JSON, all in the same
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


# Grammars that SGLang cannot look ahead with: outlines', and those of a backend of one's own, which
# are XGrammar's with neither its masks nor its rollback.
OUTLINES_PLAIN = PLAIN.named("outlines-plain").having(grammar_backend="outlines")
OUTLINES = OUTLINES_PLAIN.named("outlines").having(**DFLASH_FLAGS)
OWN = FEATURES_DFLASH.named("own-grammars").having(grammar_backend="own").changed("own_grammars")
GUIDANCE_PLAIN = PLAIN.named("llguidance-plain").having(
    grammar_backend="llguidance", enable_custom_logit_processor=True
)
GUIDANCE = GUIDANCE_PLAIN.named("llguidance").having(**DFLASH_FLAGS)


def regular(server: Server) -> Answers:
    """Ask as `feature_requests.grammars` does, without EBNF and bounds of numbers, which outlines
    does not have."""
    lines = features.POINT["properties"]["lines"] | {"items": {"type": "integer"}}
    schema = features.POINT | {"properties": features.POINT["properties"] | {"lines": lines}}
    kinds: list[dict[str, str]] = [
        {"json_schema": json.dumps(schema)},
        *({"regex": r} for r in features.REGULAR),
        {},
    ]
    return together(
        lambda t=t, k=k: ask(server, t, max_new_tokens=80, ignore_eos=False, **k)
        for k in kinds
        for t in workload.prompts()["demo"][:2]
    )
