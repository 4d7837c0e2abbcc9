"""Which steps and tokens count, from what SGLang's scheduler does with a step's result."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_dflash.drafting.acceptance_length import VerifySteps
from sglang_dflash.serving.show.counts import AcceptanceCounts, IgnoredSeeds
from sglang_dflash.serving.step.scheduler import count_kept_tokens


class Request:
    """The fields of SGLang's Req that the counts read."""

    def __init__(self, output: int = 1, **params: Any) -> None:
        self.rid, self.output_ids = str(output), list(range(output))
        self.finished_len: int | None = None
        self.spec_verify_ct = self.spec_num_correct_drafts = 0
        self.custom_logit_processor: str | None = None
        self.sampling_params = SimpleNamespace(**{"sampling_seed": None, "top_k": 20, **params})

    @property
    def output_ids_through_stop(self) -> list[int]:
        return self.output_ids[: self.finished_len]


def takes(accepted: int, kept: int | None = None, appended: int | None = None) -> Any:
    """The scheduler's work on a live request: `accepted` drafts and the bonus token, of which a
    grammar leaves `appended`, and the end of the request `kept`."""

    def process(request: Request) -> None:
        request.spec_verify_ct += 1
        request.spec_num_correct_drafts += accepted
        before = len(request.output_ids)
        request.output_ids += [7] * (accepted + 1 if appended is None else appended)
        if kept is not None:
            request.finished_len = before + kept

    return process


def skipped(request: Request) -> None:
    """A request that has finished, or was retracted."""


def processed(
    counts: Any, requests: list[Request], work: list[Callable[[Request], None]], width: int = 8
) -> None:
    def original(processor: Any, batch: Any, result: Any) -> None:
        for request, process in zip(batch.reqs, work, strict=True):
            process(request)

    worker = None
    if counts is not None:
        worker = SimpleNamespace(learn=lambda steps, _width, _accepted: counts.add(steps))
    processor = SimpleNamespace(model_worker=SimpleNamespace(dflash=worker))
    result = SimpleNamespace(speculative_num_draft_tokens=width)
    count_kept_tokens(original, processor, SimpleNamespace(reqs=requests), result)


def test_what_a_request_does_not_keep_is_not_counted() -> None:
    counts = AcceptanceCounts(8)
    work = [
        takes(3),
        skipped,
        # max_new_tokens, or a stop, behind the second accepted draft.
        takes(7, kept=2),
        # A grammar ends behind the first accepted draft.
        takes(5, appended=1),
        # The end is the bonus token.
        takes(2, kept=3),
    ]
    processed(counts, [Request(i + 1) for i in range(5)], work)
    assert counts.drafted == VerifySteps(4, 4 + 2 + 1 + 3)
    assert counts.acceptance_length == 2.5
    assert counts.accepted == [4, 3, 1, 0, 0, 0, 0]
    assert counts.by_position() == [1.0, 0.75, 0.25, 0, 0, 0, 0]
    assert counts.undrafted == VerifySteps()


def test_steps_without_drafts_are_counted_separately() -> None:
    counts, single, free = AcceptanceCounts(8), Request(), Request()
    single.custom_logit_processor = "one"
    processed(counts, [single, free], [takes(0), takes(4)])
    processed(counts, [single, free], [takes(0), takes(0)], width=1)
    assert counts.drafted == VerifySteps(1, 5) and counts.undrafted == VerifySteps(3, 3)


def test_a_position_is_divided_by_the_steps_that_drafted_it() -> None:
    counts = AcceptanceCounts(8)
    processed(counts, [Request()], [takes(1)], width=4)
    processed(counts, [Request()], [takes(7)], width=8)
    assert counts.accepted == [2, 1, 1, 1, 1, 1, 1]
    assert counts.by_position() == [1.0, 0.5, 0.5, 1.0, 1.0, 1.0, 1.0]


def test_a_server_without_steps_has_no_acceptance() -> None:
    counts = AcceptanceCounts(8)
    assert counts.acceptance_length is None and counts.by_position() == []


def test_another_worker_is_left_alone() -> None:
    request = Request()
    processed(None, [request], [takes(3)])
    assert len(request.output_ids) == 5


@pytest.mark.parametrize(
    ("seeded", "params", "warnings"),
    [
        (False, {"sampling_seed": 3}, 1),
        (False, {"sampling_seed": 0}, 1),
        (False, {}, 0),
        # Greedy: a seed has no effect anywhere.
        (False, {"sampling_seed": 3, "top_k": 1}, 0),
        (True, {"sampling_seed": 3}, 0),
    ],
)
def test_a_seed_that_is_ignored_is_warned_of_once(
    seeded: bool, params: dict[str, Any], warnings: int, caplog: pytest.LogCaptureFixture
) -> None:
    info = SimpleNamespace(sampling_seed=object() if seeded else None)
    batch = SimpleNamespace(sampling_info=info, reqs=[Request(), Request(**params)])
    ignored = IgnoredSeeds()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            ignored.warn_once(batch)
    assert len(caplog.records) == warnings
    if warnings:
        assert "--enable-deterministic-inference" in caplog.text
