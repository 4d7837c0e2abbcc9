"""Penalties that count every output token once, whatever else is in the batch.

SGLang counts a request's newest output token while it schedules the next decode step
(`ScheduleBatch.cumulate_penalty_output_tokens`). Under overlap scheduling that token is still on
the device: SGLang counts the one before, and before the first the prompt's last token. If another
request's prefill comes in between, the host catches up: one token is never counted and the next one
twice. A retracted request starts from zero. So an answer depends on what else was served.

Here, under overlap, the newest tokens are counted where they are known, on the device right before
the forward that reads them (`count_newest`). A request that comes back after a retraction, also to
a decode server, begins with the counts of its output (`count_from_the_start`). In plain decoding
without overlap SGLang's own counting is right and stays. Our worker commits several tokens per
step, which SGLang never counts: they are always counted here (`BlockPenalties`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from sglang_dflash.serving.step.batch import to_device


class Counted(NamedTuple):
    """The fields of a penalizer: sums by token `[R, V]`, and each request's penalty `[R, 1]`."""

    counts: str
    penalty: str
    adds_up: bool


# SGLang's penalizers by class name, but BatchedMinNewTokensPenalizer, which counts tokens only.
PENALIZERS = {
    "BatchedFrequencyPenalizer": Counted(
        "cumulated_frequency_penalties", "frequency_penalties", adds_up=True
    ),
    "BatchedPresencePenalizer": Counted(
        "cumulated_presence_penalties", "presence_penalties", adds_up=False
    ),
    "BatchedRepetitionPenalizer": Counted(
        "cumulated_repetition_penalties", "repetition_penalties", adds_up=False
    ),
}
LENGTH = "len_output_tokens"


def count_while_scheduling(original: Any, batch: Any) -> None:
    """Around `ScheduleBatch.cumulate_penalty_output_tokens`: not in plain decoding under overlap.

    Other workers call it on their own terms; ours does not.
    """
    if not (batch.enable_overlap and batch.spec_algorithm.is_none()):
        original(batch)


def count_newest(scheduler: Any, batch: Any, *, overlap: bool) -> None:
    """Before `Scheduler._forward_isolation`, which sums up the penalties of the next forward."""
    info = batch.sampling_info
    ours = getattr(scheduler.draft_worker, "block_penalties", None)
    if info is None or (ours is None and not (overlap and batch.spec_algorithm.is_none())):
        return
    orchestrator = info.penalizer_orchestrator
    if orchestrator is None or not orchestrator.is_required:
        return
    requests, is_decode = len(batch.reqs), batch.forward_mode.is_decode()
    # A prefill may have decoding requests at its end (--enable-mixed-chunk).
    decoding = requests if is_decode else len(batch.decoding_reqs or ())
    if decoding == 0:
        return
    if ours is None:
        tokens, is_new = batch.input_ids[len(batch.input_ids) - decoding :].long()[:, None], None
    else:
        tokens, is_new = ours.newest(batch.req_pool_indices[requests - decoding :].long())
    rows = torch.arange(requests - decoding, requests, device=tokens.device)
    count(orchestrator, rows, tokens, is_new)
    if ours is not None and is_decode:
        ours.begin(orchestrator)
    if overlap:
        # The next schedule filters and merges what was just written on this stream.
        scheduler.schedule_stream.wait_stream(scheduler.forward_stream)


def count_from_the_start(_result: None, orchestrator: Any, *_: Any, **__: Any) -> None:
    """After `BatchedPenalizerOrchestrator.__init__`: count the output of retracted requests.

    Also fixes the order in which penalties are applied, which is that of a set: terms before
    factors, as under overlap.
    """
    ordered = sorted(
        orchestrator.penalizers.items(), key=lambda item: (item[1].is_multiplicative, str(item[0]))
    )
    orchestrator.penalizers = dict(ordered)
    batch = orchestrator.batch
    mode = batch.forward_mode
    if not orchestrator.is_required or not (mode.is_extend() or mode.is_prebuilt()):
        return
    # The first decode step behind a prompt of another server counts the newest token.
    end = -1 if mode.is_prebuilt() else None
    outputs = [request.output_ids[:end] for request in batch.reqs]
    if any(outputs):
        rows = [row for row, output in enumerate(outputs) for _ in output]
        tokens = [token for output in outputs for token in output]
        rows_and_tokens = to_device(torch.tensor((rows, tokens)), orchestrator.device)
        count(orchestrator, rows_and_tokens[0], rows_and_tokens[1][:, None])


def count(orchestrator: Any, rows: Tensor, tokens: Tensor, is_new: Tensor | None = None) -> None:
    """Count output tokens in place.

    Args:
        rows: int64 `[N]`, of the batch.
        tokens: int64 `[N, K]`, output tokens of each.
        is_new: bool `[N, K]`, those that count: the first one of each, at least. None for all.
    """
    if is_new is None:
        is_new = torch.ones_like(tokens, dtype=torch.bool)
    # What does not count is the first token once more, with no weight where weights add up.
    tokens = torch.where(is_new, tokens, tokens[:, :1])
    for penalizer in orchestrator.penalizers.values():
        if not penalizer.is_prepared():
            continue
        if hasattr(penalizer, LENGTH):
            lengths = is_new.sum(1, dtype=torch.int32)[:, None]
            getattr(penalizer, LENGTH).index_add_(0, rows, lengths)
            continue
        names = PENALIZERS[type(penalizer).__name__]
        penalties = getattr(penalizer, names.penalty)[rows].expand(tokens.shape)
        if names.adds_up:
            penalties = penalties * is_new
        getattr(penalizer, names.counts).index_put_(
            (rows[:, None].expand(tokens.shape), tokens), penalties, accumulate=names.adds_up
        )
