"""Exceptions at chosen places of SGLang's and our steps, for tests of containment.

A request whose id is `guilty.PLACE.N...` makes every step raise that has it at that place, once it
has N output tokens. A file PLACE in the folder FAULTS makes the next step there raise, whoever is
in it, and disappears; a file PLACE.always makes every step there raise.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any


class Fault(RuntimeError):
    """The error that is raised."""


def _fail(place: str, requests: Iterable[Any]) -> None:
    once = Path(os.environ["FAULTS"]) / place
    for request in requests:
        parts = request.rid.split(".")
        if parts[:2] == ["guilty", place] and len(request.output_ids) >= int(parts[2]):
            raise Fault(f"in {place}")
    if requests and once.with_suffix(".always").exists():
        raise Fault(f"in {place}")
    if requests and once.exists():
        once.unlink(missing_ok=True)
        raise Fault(f"once in {place}")


def _wrap(owner: Any, name: str, place: str, requests_of: Callable[..., Iterable[Any]]) -> None:
    original = getattr(owner, name)

    def faulty(*args: Any, **kwargs: Any) -> Any:
        _fail(place, list(requests_of(*args, **kwargs)))
        return original(*args, **kwargs)

    setattr(owner, name, faulty)


PLAIN_PLACES = (
    "plan-prefill", "plan-decode", "merge", "prefill", "decode",
    "prefill-result", "decode-result", "finish", "send",
)  # fmt: skip
# Whose target has no decode batches.
DFLASH_PLACES = (*(p for p in PLAIN_PLACES if p != "decode"), "propose", "verify", "commit")


def install() -> None:
    """Wrap all places, in the process from which the scheduler is forked."""
    from sglang.srt.managers import schedule_batch, tp_worker
    from sglang.srt.managers.scheduler_components import batch_result_processor, output_streamer

    from sglang_dflash.serving.step.worker import DFlashWorker

    batch = schedule_batch.ScheduleBatch
    _wrap(batch, "prepare_for_extend", "plan-prefill", lambda self: self.reqs)
    _wrap(batch, "prepare_for_decode", "plan-decode", lambda self: self.reqs)
    _wrap(batch, "merge_batch", "merge", lambda self, other: [*self.reqs, *other.reqs])
    worker = tp_worker.TpModelWorker

    def of_forward(self: Any, batch: Any = None, *_: Any, **__: Any) -> Iterable[Any]:
        return [] if batch is None or not batch.forward_mode.is_extend() else batch.reqs

    def of_decode(self: Any, batch: Any = None, *_: Any, **__: Any) -> Iterable[Any]:
        return [] if batch is None or batch.forward_mode.is_extend() else batch.reqs

    _wrap(worker, "forward_batch_generation", "prefill", of_forward)
    _wrap(worker, "forward_batch_generation", "decode", of_decode)
    processor = batch_result_processor.SchedulerBatchResultProcessor
    # Not the methods themselves: patches refuse to change what others have changed.
    _wrap(processor, "move_logprobs_to_cpu", "prefill-result", lambda _, batch, **__: batch.reqs)
    _wrap(
        processor, "_normalize_decode_outputs", "decode-result", lambda _, batch, **__: batch.reqs
    )
    _wrap(schedule_batch.Req, "_check_token_based_finish", "finish", lambda self, *_, **__: [self])
    streamer = output_streamer.SchedulerOutputStreamer
    _wrap(streamer, "_stream_output_generation", "send", lambda self, reqs, *_, **__: reqs)
    _wrap(DFlashWorker, "_propose", "propose", lambda self, batch, *_: batch.reqs)
    _wrap(DFlashWorker, "_verify", "verify", lambda self, batch, *_: batch.reqs)
    _wrap(DFlashWorker, "_commit", "commit", lambda self, batch, *_: batch.reqs)
