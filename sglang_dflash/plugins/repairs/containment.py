"""An exception in a step of the scheduler ends the requests that caused it, not the server.

SGLang ends its process, and with it every request. Here the loop is entered again: the pools are
emptied, and the requests in flight go back to the queue as after a retraction (`recovery`).

Who is guilty: all requests of the failed batch are suspects, and are put on `Probation`. Whoever is
ended gets HTTP 500 with the error.

An error that no request can have caused ends the server as before: one outside of the planning,
running and processing of a batch, one of the device, one that the ranks do not share, and a failure
of a plain request, which is tried after many failures in a row.
"""

from __future__ import annotations

import traceback
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
from sglang.srt.runtime_context import get_parallel, get_spec
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_dflash.common.errors import cut
from sglang_dflash.common.log import Log
from sglang_dflash.patches.restored import restored
from sglang_dflash.plugins.repairs import recovery
from sglang_dflash.plugins.repairs.probation import Probation

logger = Log(__name__)

# The attribute of SGLang's scheduler that holds its `Containment`.
ATTRIBUTE = "sglang_dflash_containment"
# In /metrics, with their help.
SERIES = {
    "contained_steps": "Steps that failed without ending the server.",
    "ended_requests": "Requests that were ended because a step failed.",
}
# Names of SGLang's code, by which the frames of an error tell what failed: methods of the scheduler
# whose failure a request can cause, and their local that is the batch.
BATCH_OF = {
    "run_batch": "batch",
    "process_batch_result": "batch",
    "launch_batch_sample_if_needed": "cur_batch",
}
PLANS, PLANS_PREFILL = "get_next_batch_to_run", "_get_new_batch_prefill_raw"
# Locals of the latter: the batch that it makes, the requests for it, and the one that it looks at.
NEW_BATCH, ADMITTED, CANDIDATE = "new_batch", "can_run_list", "req"
# After so many failures without a step that succeeds, a plain request is tried.
PATIENCE = 16


# -- patches ---------------------------------------------------------------------------------------


def run_loop(original: Any, scheduler: Any) -> None:
    """Around `_dispatch_event_loop_once`."""
    why_off = unserved(scheduler)
    containment = Containment(scheduler, why_off)
    setattr(scheduler, ATTRIBUTE, containment)
    if why_off is not None:
        logger.warning(
            "an exception in a step ends the server, as %s is not served by what "
            "would end only the request that caused it", why_off,
        )  # fmt: skip
        return original(scheduler)
    while True:
        try:
            return original(scheduler)
        except Exception as error:
            containment.contain(error)


def plan(original: Any, scheduler: Any, *args: Any, **batches: Any) -> Any:
    """Around `Scheduler.get_next_batch_to_run`: during a probation, admit some only."""
    containment = _active(scheduler)
    if containment is None:
        return original(scheduler, *args, **batches)
    with containment.planning():
        # It may have emptied the batches that the caller gave.
        batches = {"running_batch": scheduler.running_batch, "last_batch": scheduler.last_batch}
        return original(scheduler, **batches)


def note_result(scheduler: Any, batch: Any, _result: Any) -> None:
    """Before `Scheduler.process_batch_result`."""
    containment = _active(scheduler)
    if containment is not None:
        containment.result = [recovery.Before.of(request) for request in batch.reqs]


def take_in(original: Any, scheduler: Any, received: Sequence[Any]) -> None:
    """Around `Scheduler.process_input_requests`: a request that cannot be queued is ended."""
    containment = _active(scheduler)
    if containment is None or not received:
        return original(scheduler, received)
    for one in received:
        try:
            original(scheduler, [one])
        except Exception as error:
            containment.refuse(one, error)
    return None


def add_report(_result: None, controller: Any, state: dict[str, Any]) -> None:
    """After SGLang has begun the state that /server_info shows."""
    containment = getattr(controller.scheduler, ATTRIBUTE, None)
    if containment is not None:
        state["containment"] = containment.report()


def _active(scheduler: Any) -> Containment | None:
    """The scheduler's containment, if it is on."""
    found = getattr(scheduler, ATTRIBUTE, None)
    return None if found is None or found.why_off is not None else found


# -- what failed -----------------------------------------------------------------------------------


def unserved(scheduler: Any) -> str | None:
    """A setting of the server under which a failed step is not contained; None if there is none."""
    parallel = get_parallel()
    found = {
        "prefill/decode disaggregation": scheduler.disaggregation_mode != DisaggregationMode.NULL,
        "pipeline parallelism": parallel.pp_size > 1,
        "attention data parallelism": parallel.attn_dp_enabled,
        "PD multiplexing": scheduler.enable_pdmux,
        "MLX": scheduler.enable_overlap_mlx,
        "diffusion decoding": scheduler.dllm_config is not None,
        "HiSparse": scheduler.enable_hisparse,
        "a hierarchical cache": scheduler.enable_hierarchical_cache or scheduler.enable_lmcache,
        "an external cache": (
            scheduler.enable_unified_cache_external_linker
            or scheduler.server_args.enable_flexkv
            or scheduler.server_args.radix_cache_backend is not None
        ),
        "an embedding model": not scheduler.is_generation,
    }
    return next((name for name, given in found.items() if given), None)


class Failure(NamedTuple):
    """The requests and phase of a failed step.

    Attributes:
        requests: those of which one or more may have caused the failure.
        prefills: whether it was the first step of all these requests.
    """

    requests: list[Any]
    prefills: bool


def failure_of(error: BaseException, scheduler: Any) -> Failure | None:
    """From the frames of the error; None if no request can have caused it."""
    names = frames_of(error)
    for method, local in BATCH_OF.items():
        batch = names.get(method, {}).get(local)
        if batch is not None:
            # A mixed batch has requests that decode, too.
            prefills = batch.forward_mode.is_extend() and not batch.decoding_reqs
            return Failure(list(batch.reqs), prefills)
    if PLANS not in names:
        return None
    if PLANS_PREFILL in names:
        found = names[PLANS_PREFILL]
        batch, request = found.get(NEW_BATCH), found.get(CANDIDATE)
        chosen = batch.reqs if batch is not None else found.get(ADMITTED)
        chosen = chosen or ([request] if request is not None else scheduler.waiting_queue)
        return Failure(list(chosen), prefills=True)
    batches = (scheduler.running_batch, scheduler.last_batch)
    return Failure(recovery.distinct(batch.reqs for batch in batches if batch), prefills=False)


def frames_of(error: BaseException) -> dict[str, Mapping[str, Any]]:
    """The locals of each function through which the error went, by its name."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return {frame.f_code.co_name: frame.f_locals for frame in frames}


def where(error: BaseException) -> str:
    """The innermost place of the error, and its type: what two failures of one kind share."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} at {last.filename}:{last.lineno}"


class Containment:
    """Contains the failures of one scheduler.

    Attributes:
        why_off: the setting under which it is off; None if it is on.
        steps: failures that were contained.
        ended: requests that were ended.
        last_error: the last contained error, with its type.
        result: the requests whose result was processed last, before it was.
    """

    def __init__(self, scheduler: Any, why_off: str | None = None) -> None:
        self.why_off, self.steps, self.ended = why_off, 0, 0
        self.last_error: str | None = None
        self.result: list[recovery.Before] = []
        self._scheduler = scheduler
        self._probation: Probation | None = None
        self._kinds: set[str] = set()
        self._in_a_row = self._planned = 0
        # What the scheduler held when it began to plan: it drops requests before it has a batch.
        self._before: list[list[Any]] = []
        self._ranks: Any = None
        if why_off is None and get_parallel().tp_size > 1:
            # Of its own: a rank that does not fail waits in a collective of another group. A rank
            # that fails waits so long for the others to fail.
            limit = timedelta(seconds=10)
            self._ranks = torch.distributed.new_group(backend="gloo", timeout=limit)
        self._series = _series(scheduler)

    def report(self) -> dict[str, Any]:
        """For /server_info."""
        return {
            "on": self.why_off is None,
            "why_off": self.why_off,
            "contained_steps": self.steps,
            "ended_requests": self.ended,
            "last_error": self.last_error,
        }

    def contain(self, error: Exception) -> None:
        """Recover, so that the loop can be entered again. Raises the error if it cannot."""
        s, failure = self._scheduler, failure_of(error, self._scheduler)
        self._agree(error, failure)
        frames = frames_of(error)
        if "process_batch_result" in frames:
            recovery.undo(self.result, frames)
        if failure is None or not failure.requests or isinstance(error, torch.AcceleratorError):
            raise error
        suspects = [request for request in failure.requests if not request.finished()]
        # Raises if the device is lost.
        s.device_module.synchronize()
        self._in_a_row, self._planned = self._in_a_row + 1, 0
        guilty = self._judge(suspects, failure.prefills, error)
        self._note(error, f"{len(guilty) or 'no'} of {len(suspects)} requests ended")
        found = recovery.in_flight(s, [failure.requests, *self._before])
        reason = f"The step that served this request failed: {_short(error)}"
        self._count(recovery.recover(s, found, guilty, reason))
        self._before = []
        if self._in_a_row % PATIENCE == 0:
            self._try_a_plain_request()

    def refuse(self, received: Any, error: Exception) -> None:
        """End the requests of an input that could not be queued. Raises the error if it has none,
        as after a failed update of the weights."""
        tokenized = self._scheduler._tokenized_requests(received)
        self._agree(error, Failure([], prefills=True))
        if not tokenized or isinstance(error, torch.AcceleratorError):
            raise error
        self._note(error, "before the request was queued")
        reason = f"This request cannot be queued: {_short(error)}"
        self._count(recovery.end_unqueued(self._scheduler, tokenized, reason))

    @contextmanager
    def planning(self) -> Iterator[None]:
        """Remember what is in flight. During a probation, show only who is admitted."""
        s = self._scheduler
        self._planned += s.last_batch is not None
        # Under overlap, the result of a step is processed after the next is planned.
        if self._planned > 2:
            self._in_a_row = 0
        admitted = self._admitted()
        queue, last = s.waiting_queue, [] if s.last_batch is None else s.last_batch.reqs
        self._before = [queue, s.running_batch.reqs, last, [s.chunked_req]]
        if admitted is None:
            yield
            self._before = []
            return
        with restored(s.grammar_manager, "grammar_queue"):
            s.grammar_manager.grammar_queue = []
            s.waiting_queue = [r for r in queue if r in admitted]
            try:
                yield
            finally:
                s.waiting_queue = s.waiting_queue + [r for r in queue if r not in admitted]
        self._before = []

    def _admitted(self) -> list[Any] | None:
        """Return the requests that may be scheduled; None for all. Ends a probation that all have
        passed."""
        found = recovery.in_flight(self._scheduler, []) if self._probation is not None else []
        while self._probation is not None and self._probation.passed(found):
            was_alone = self._probation.is_alone
            if self._probation.advance():
                self._probation = None
            elif was_alone:
                # It waits while others are tried.
                recovery.recover(self._scheduler, found, (), "")
                found = recovery.in_flight(self._scheduler, [])
        return None if self._probation is None else self._probation.admitted

    def _judge(self, suspects: list[Any], prefills: bool, error: Exception) -> list[Any]:
        """Return the requests to end now. Others of the failed step are put on probation."""
        probation = self._probation
        if not suspects:
            return []  # The one that failed has finished: it is sent, or ended, by itself.
        if probation is None or not any(r in probation.admitted for r in suspects):
            # The failed step, and under overlap the one before, were to give so many tokens.
            missing = 1 if prefills else 1 + 2 * (get_spec().speculative_num_draft_tokens or 1)
            self._probation = Probation(suspects, missing)
            return []
        guilty = probation.failed()
        if guilty is None:
            return []
        if guilty.rid.startswith(PLAIN_REQUEST):
            raise error
        self._probation = None
        return [guilty]

    def _agree(self, error: Exception, failure: Failure | None) -> None:
        """Raises the error unless all ranks have failed alike."""
        if self._ranks is None:
            return
        state = None if failure is None else [(r.rid, len(r.output_ids)) for r in failure.requests]
        mine = (self._scheduler.forward_ct, where(error), state)
        found: list[Any] = [None] * self._ranks.size()
        try:
            torch.distributed.all_gather_object(found, mine, group=self._ranks)
        except RuntimeError:
            raise error from None
        if any(theirs != mine for theirs in found):
            raise error

    def _note(self, error: Exception, what: str) -> None:
        """Log one traceback per kind."""
        self.last_error = _short(error)
        kind = where(error)
        known = kind in self._kinds
        self._kinds.add(kind)
        logger.error(
            "contained a failed step (%s): %s%s", what, self.last_error,
            "" if known else "; further ones of this kind are logged without a traceback",
            exc_info=None if known else error,
        )  # fmt: skip

    def _try_a_plain_request(self) -> None:
        """It is prefilled and decoded, and fails if every step does, whatever the request."""
        rid = f"{PLAIN_REQUEST}_{self.steps}"
        params = SamplingParams(max_new_tokens=4, temperature=0.0, ignore_eos=True)
        params.normalize(None)
        self._scheduler.handle_generate_request(
            TokenizedGenerateReqInput(
                rid=rid, input_text="", input_ids=array("q", [0]), input_embeds=None,
                mm_inputs=None, token_type_ids=None, sampling_params=params, return_logprob=False,
                logprob_start_len=-1, top_logprobs_num=0, token_ids_logprob=None, stream=False,
            )
        )  # fmt: skip
        plain = [r for r in self._scheduler.waiting_queue if r.rid == rid]
        self._probation = Probation(plain, missing=4)

    def _count(self, ended: int) -> None:
        self.steps, self.ended = self.steps + 1, self.ended + ended
        for series, change in zip(self._series, (1, ended), strict=False):
            series.inc(change)


# SGLang passes no answer to a request of such a name on.
PLAIN_REQUEST = f"{HEALTH_CHECK_RID_PREFIX}_after_failures"


def _short(error: BaseException) -> str:
    return f"{type(error).__name__}: {cut(str(error))}"


def _series(scheduler: Any) -> list[Any]:
    """In /metrics: contained steps, ended requests. Empty without --enable-metrics."""
    reporter = scheduler.metrics_reporter
    if not reporter.enable_metrics or not reporter.current_scheduler_metrics_enabled:
        return []
    # Imported late: SGLang first sets the directory in which its processes share metrics.
    from prometheus_client import Counter

    labels = reporter.metrics_collector.labels
    series = [Counter(f"sglang_dflash_{name}", text, [*labels]) for name, text in SERIES.items()]
    return [one.labels(**labels) for one in series]
