"""Penalties do not depend on what else is served: not on the batch, not on overlap scheduling, not
on retractions, with and without drafts. In float32, greedy."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from sglang_dflash.bench.server import Server
from tests.engine import workload
from tests.engine.client import ask, flush, together
from tests.engine.servers import DFLASH_FLAGS, PLAIN, TIGHT, ServerConfig

# SGLang compiles what applies a penalty: half a minute of every server here, and not tested.
BASE = PLAIN.having(
    max_running_requests=16, chunked_prefill_size=128, enable_mixed_chunk=True
).with_env(TORCHDYNAMO_DISABLE="1")
OVERLAPPED = BASE.named("penalties")
NOT_OVERLAPPED = BASE.named("penalties-no-overlap").having(disable_overlap_schedule=True)
DRAFTS = OVERLAPPED.named("penalties-dflash").having(**DFLASH_FLAGS)
DRAFTS_NOT_OVERLAPPED = NOT_OVERLAPPED.named("penalties-dflash-no-overlap").having(**DFLASH_FLAGS)
WITHOUT_ROWS = OVERLAPPED.named("no-penalty-rows").with_module(
    "tests.engine.no_penalty_rows_server"
)
# A repetition penalty with others, too: the order in which they are applied is fixed.
WAYS: list[dict[str, Any]] = [
    {"frequency_penalty": 0.9},
    # Rewards repetition: a count that comes late changes the next token.
    {"frequency_penalty": -2.0},
    {"presence_penalty": 1.5},
    {"repetition_penalty": 1.4},
    {"min_new_tokens": 25, "ignore_eos": False},
    {"frequency_penalty": 0.4, "presence_penalty": 0.3, "repetition_penalty": 1.2},
]
# Seconds between requests: prefills come in between the decode steps of others.
GAP = 0.06
Answers = list[dict[str, Any]]


def requests() -> list[Callable[[Server], dict[str, Any]]]:
    """Sixteen: with a penalty and without, in turn. Some prompts take several prefill chunks.

    Of texts that the target did not memorize: there a penalty changes the answer.
    """
    texts = [*workload.prompts()["short"][4:16], *workload.prompts()["long"][:4]]
    ways = [WAYS[i // 2 % len(WAYS)] if i % 2 == 0 else {} for i in range(len(texts))]
    return [
        lambda server, text=text, way=way: ask(server, text, max_new_tokens=40, **way)
        for text, way in zip(texts, ways, strict=True)
    ]


def solo(server: Server) -> Answers:
    """One request after another."""
    return [request(server) for request in requests()]


def mixed(server: Server) -> Answers:
    """Each joins the batch of those before it."""
    flush(server)

    def later(i: int, request: Callable[[Server], dict[str, Any]]) -> dict[str, Any]:
        time.sleep(i * GAP)
        return request(server)

    return together(lambda i=i, r=r: later(i, r) for i, r in enumerate(requests()))


@pytest.mark.recorded(NOT_OVERLAPPED, solo)
@pytest.mark.parametrize(
    "config", [NOT_OVERLAPPED, OVERLAPPED, DRAFTS, DRAFTS_NOT_OVERLAPPED], ids=str
)
def test_every_answer_in_a_mixed_batch_is_that_of_a_request_by_itself(
    config: ServerConfig, server: Server, answers: Any
) -> None:
    expected = {"all": answers(NOT_OVERLAPPED, solo)}
    workload.assert_same_outputs({"all": solo(server)}, expected)
    workload.assert_same_outputs({"all": mixed(server)}, expected)


@pytest.mark.server(WITHOUT_ROWS)
@pytest.mark.recorded(NOT_OVERLAPPED, solo)
def test_answers_depend_on_the_batch_without_the_rows(server: Server, answers: Any) -> None:
    """Without a batch, too: SGLang counts the prompt's last token, and every other a step late."""
    expected = answers(NOT_OVERLAPPED, solo)

    def same(got: Answers) -> list[bool]:
        return [a["output_ids"] == b["output_ids"] for a, b in zip(got, expected, strict=True)]

    by_itself = same(solo(server))
    # Requests without a penalty agree.
    assert all(by_itself[1::2]) and not all(by_itself[::2])


def penalised_together(server: Server) -> Answers:
    """Eight at once, so that a tight pool retracts some."""
    jobs = requests()[::2]
    return together(lambda job=job: job(server) for job in jobs)


@pytest.mark.server(TIGHT)
@pytest.mark.recorded(PLAIN, penalised_together)
def test_a_retracted_request_keeps_its_penalties(server: Server, answers: Any) -> None:
    got = penalised_together(server)
    workload.assert_same_outputs({"all": got}, {"all": answers(PLAIN, penalised_together)})
    assert sum(answer["meta_info"]["num_retractions"] for answer in got) > 0
