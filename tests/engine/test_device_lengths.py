"""Lengths that only the device knows, and requests that reach the context limit."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from sglang_dflash.bench.server import Server
from tests.engine import workload
from tests.engine.servers import DEVICE_LENGTHS, PLAIN

CONTEXT = 96


def up_to_the_limit(server: Server) -> dict[str, list[dict[str, Any]]]:
    """Five prompts of different lengths at a time, each continued to the end of the context."""

    def one(text: str) -> dict[str, Any]:
        first = server.generate(text, temperature=0, max_new_tokens=1, ignore_eos=True)
        # SGLang takes no more than context length - 2 tokens of prompt and answer.
        left = CONTEXT - 2 - first["meta_info"]["prompt_tokens"]
        return server.generate(text, temperature=0, max_new_tokens=left, ignore_eos=True)

    with ThreadPoolExecutor(5) as pool:
        return {"short": list(pool.map(one, workload.prompts()["short"][:15]))}


@pytest.mark.server(DEVICE_LENGTHS)
@pytest.mark.recorded(PLAIN, up_to_the_limit)
def test_requests_reach_the_context_limit(answers: Any, server: Server) -> None:
    """The extension fails a step whose lengths are known on the host."""
    got = up_to_the_limit(server)
    workload.assert_same_outputs(got, answers(PLAIN, up_to_the_limit))
    assert all(a["meta_info"]["prompt_tokens"] + a["meta_info"]["completion_tokens"] == CONTEXT - 2
               for a in got["short"])  # fmt: skip
    assert workload.acceptance_length(got["short"]) > 1.5
