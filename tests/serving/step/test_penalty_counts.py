"""Penalty counts: equal to SGLang's own of a request by itself, without overlap, token by token."""

from __future__ import annotations

import inspect
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.sampling import penaltylib
from sglang.srt.sampling.penaltylib.orchestrator import BatchedPenalizerOrchestrator
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from sglang_dflash.serving.step import penalty_counts
from tests.serving.batches import batch_of, request_of, sampling_info

VOCAB = 32
WAYS: list[dict[str, Any]] = [
    {"frequency_penalty": 0.9},
    {"presence_penalty": 1.5},
    {"repetition_penalty": 1.4},
    {"min_new_tokens": 6},
    {},
    {"frequency_penalty": 0.3, "presence_penalty": 0.2, "repetition_penalty": 1.1},
]
KINDS = {
    penaltylib.BatchedFrequencyPenalizer,
    penaltylib.BatchedMinNewTokensPenalizer,
    penaltylib.BatchedPresencePenalizer,
    penaltylib.BatchedRepetitionPenalizer,
}


def request(output: list[int] = [], **params: Any) -> Any:  # noqa: B006
    tokenizer = SimpleNamespace(additional_stop_token_ids=None, eos_token_id=0)
    made = request_of(prompt=[1, 2, 3], output=output, stop_token_ids={5}, **params)
    made.eos_token_ids, made.tokenizer = {0}, tokenizer
    return made


def batch(*requests: Any, mode: ForwardMode = ForwardMode.EXTEND, **more: Any) -> ScheduleBatch:
    none = SpeculativeAlgorithm.NONE
    return batch_of(*requests, forward_mode=mode, enable_overlap=True, spec_algorithm=none, **more)


@pytest.fixture(autouse=True)
def sglangs_init(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's own constructor, whether or not the plugins were loaded before."""
    own = inspect.unwrap(BatchedPenalizerOrchestrator.__init__)
    monkeypatch.setattr(BatchedPenalizerOrchestrator, "__init__", own)


def orchestrator(of: ScheduleBatch) -> BatchedPenalizerOrchestrator:
    made = BatchedPenalizerOrchestrator(VOCAB, of, KINDS)
    of.sampling_info = sampling_info(penalizer_orchestrator=made)
    return made


def applied(made: BatchedPenalizerOrchestrator, logits: torch.Tensor | None = None) -> torch.Tensor:
    """Every row's logits after its penalties, by SGLang's own code."""
    if logits is None:
        logits = torch.linspace(-2, 2, VOCAB).repeat(len(made.reqs()), 1)
    logits, ones = logits.clone(), torch.ones(len(logits), 1)
    info = sampling_info(penalizer_orchestrator=made, temperatures=ones, vocab_size=VOCAB)
    # SGLang compiles the factors.
    with torch.compiler.set_stance("force_eager"):
        info.copy_for_forward().apply_logits_bias(logits)
    return logits


def expected(
    params: dict[str, Any],
    output: list[int],
    logits: torch.Tensor | None = None,
) -> torch.Tensor:
    """One request's logits `[V]` after its output, by SGLang's own counting of it alone."""
    alone = batch(request(**params))
    made = orchestrator(alone)
    for token in output:
        made.cumulate_output_tokens(torch.tensor([token]))
    return applied(made, None if logits is None else logits[None])[0]


class Scheduler(SimpleNamespace):
    """Its two streams; notes whether one waits for the other."""

    def __init__(self) -> None:
        stream = SimpleNamespace(wait_stream=lambda other: self.waited.append(other))
        super().__init__(
            schedule_stream=stream, forward_stream="forward", draft_worker=None, waited=[]
        )


def outputs(count: int) -> list[list[int]]:
    """Repeated tokens, and outputs of different lengths."""
    pick = random.Random(0)
    return [[pick.randrange(8) for _ in range(3 + 4 * i)] for i in range(count)]


def test_every_decode_step_counts_its_newest_tokens() -> None:
    requests = [request(**way) for way in WAYS]
    decoding = batch(*requests)
    made = orchestrator(decoding)
    decoding.forward_mode = ForwardMode.DECODE
    written, scheduler = outputs(len(WAYS)), Scheduler()
    for step in range(3):
        decoding.input_ids = torch.tensor([output[step] for output in written])
        penalty_counts.count_newest(scheduler, decoding, overlap=True)
    for row, way in enumerate(WAYS):
        torch.testing.assert_close(applied(made)[row], expected(way, written[row][:3]))
    assert scheduler.waited == ["forward"] * 3


def test_of_a_mixed_step_only_the_decoding_requests_count() -> None:
    """--enable-mixed-chunk: a prompt of four tokens, then one token of each decoding request."""
    first, *others = (request(**way) for way in WAYS)
    mixed = batch(first, *others, mode=ForwardMode.MIXED)
    made = orchestrator(mixed)
    mixed.decoding_reqs = others
    mixed.input_ids = torch.tensor([7, 7, 7, 7, *range(len(others))])
    penalty_counts.count_newest(Scheduler(), mixed, overlap=True)
    torch.testing.assert_close(applied(made)[0], expected(WAYS[0], []))
    for row, way in enumerate(WAYS[1:]):
        torch.testing.assert_close(applied(made)[row + 1], expected(way, [row]))


@pytest.mark.parametrize(
    "what", ["prefill", "no overlap", "no penalties", "no sampling", "other worker"]
)
def test_other_steps_count_nothing(what: str) -> None:
    """Another worker counts itself; ours: test_block_penalties.py."""
    params = {} if what == "no penalties" else WAYS[0]
    given = batch(request(**params), input_ids=torch.tensor([1, 2, 3]))
    made = orchestrator(given)
    if what == "no sampling":
        given.sampling_info = None
    if what == "other worker":
        given.spec_algorithm = SpeculativeAlgorithm.DFLASH
    if what != "prefill":
        given.forward_mode = ForwardMode.DECODE
    scheduler = Scheduler()
    penalty_counts.count_newest(scheduler, given, overlap=what != "no overlap")
    torch.testing.assert_close(applied(made)[0], expected(params, []))
    assert scheduler.waited == []


@pytest.mark.parametrize(
    ("overlap", "algorithm", "calls"),
    [
        (True, SpeculativeAlgorithm.NONE, 0),
        (False, SpeculativeAlgorithm.NONE, 1),
        (True, SpeculativeAlgorithm.EAGLE, 1),
    ],
)
def test_sglang_counts_where_it_is_right(
    overlap: bool, algorithm: SpeculativeAlgorithm, calls: int
) -> None:
    called: list[Any] = []
    given = batch()
    given.enable_overlap, given.spec_algorithm = overlap, algorithm
    penalty_counts.count_while_scheduling(called.append, given)
    assert len(called) == calls


def test_retraction_forgets_the_output_without_the_row() -> None:
    written = outputs(len(WAYS))
    back = batch(*(request(output, **way) for output, way in zip(written, WAYS, strict=True)))
    made = orchestrator(back)
    for row, way in enumerate(WAYS):
        torch.testing.assert_close(applied(made)[row], expected(way, []))
    penalty_counts.count_from_the_start(None, made)
    for row, way in enumerate(WAYS):
        torch.testing.assert_close(applied(made)[row], expected(way, written[row]))


@pytest.mark.parametrize("output", [[4], [4, 4, 7, 9]], ids=["begun", "retracted"])
def test_a_decode_server_leaves_the_newest_token_to_the_first_step(output: list[int]) -> None:
    """Disaggregation: of a request that has just come from the prefill server nothing is counted,
    of one that comes back after a retraction all but the newest token."""
    way = {"frequency_penalty": 0.5}
    come = batch(request(output, **way), mode=ForwardMode.PREBUILT)
    made = orchestrator(come)
    penalty_counts.count_from_the_start(None, made)
    torch.testing.assert_close(applied(made)[0], expected(way, output[:-1]))


def test_factors_are_applied_after_terms() -> None:
    given = batch(request(**WAYS[-1]))
    made = orchestrator(given)
    penalty_counts.count_from_the_start(None, made)
    kinds = [penalizer.is_multiplicative for penalizer in made.penalizers.values()]
    assert kinds == sorted(kinds) and set(made.penalizers) == KINDS


def test_counts_survive_a_merge_and_a_filter() -> None:
    """A request with a penalty joins one without, which then finishes."""
    running, joining = batch(request()), batch(request(**WAYS[0]))
    made, theirs = orchestrator(running), orchestrator(joining)
    made.merge(theirs)
    running.reqs += joining.reqs
    running.forward_mode, running.input_ids = ForwardMode.DECODE, torch.tensor([3, 9])
    penalty_counts.count_newest(Scheduler(), running, overlap=True)
    running.reqs = running.reqs[1:]
    made.filter(torch.tensor([1]))
    running.input_ids = torch.tensor([9])
    penalty_counts.count_newest(Scheduler(), running, overlap=True)
    torch.testing.assert_close(applied(made)[0], expected(WAYS[0], [9, 9]))
