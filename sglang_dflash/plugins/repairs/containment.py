"""Containment: an exception in a step of the scheduler ends the requests that caused it, not the
server.

SGLang would end the process, and with it every request. Here the event loop is entered again: the
pools are emptied, and the requests in flight are queued again as after a retraction (`recovery`).
All requests of the failed batch are suspects, and `Probation` finds the guilty one. A request that
is ended gets HTTP 500 with the error.

An error that no request can have caused ends the server as before: an error outside of planning,
running and processing a batch, an error of the device, an error that not all ranks have, and a
failure of a plain request, which is tried after many failures in a row.
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
# Series in /metrics, and their help texts.
SERIES = {
    "contained_steps": "Steps that failed without ending the server.",
    "ended_requests": "Requests that were ended because a step failed.",
}
# Names in SGLang's code that identify what failed in an error's frames: scheduler methods whose
# failure a request can cause, and the local variable in each that holds the batch.
BATCH_OF = {
    "run_batch": "batch",
    "process_batch_result": "batch",
    "launch_batch_sample_if_needed": "cur_batch",
}
PLANS, PLANS_PREFILL = "get_next_batch_to_run", "_get_new_batch_prefill_raw"
# Local variables of PLANS_PREFILL: the new batch, the requests admitted to it, and the request that
# is being considered.
NEW_BATCH, ADMITTED, CANDIDATE = "new_batch", "can_run_list", "req"
# After this many failures without a successful step, a plain request is tried.
PATIENCE = 16


# -- patches ---------------------------------------------------------------------------------------


def run_loop(original: Any, scheduler: Any) -> None:
    """Around `_dispatch_event_loop_once`: enter the loop again after a contained failure."""
    why_off = unsupported_setting(scheduler)
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


def plan_batch(original: Any, scheduler: Any, *args: Any, **batches: Any) -> Any:
    """Around `Scheduler.get_next_batch_to_run`: during a probation, plan admitted requests only."""
    containment = _active(scheduler)
    if containment is None:
        return original(scheduler, *args, **batches)
    with containment.planning():
        # A recovery may have replaced the batches that the caller passed.
        batches = {"running_batch": scheduler.running_batch, "last_batch": scheduler.last_batch}
        return original(scheduler, **batches)


def remember_result(scheduler: Any, batch: Any, _result: Any) -> None:
    """Before `Scheduler.process_batch_result`: remember the batch's requests as they are."""
    containment = _active(scheduler)
    if containment is not None:
        containment.result = [recovery.RequestSnapshot.of(request) for request in batch.reqs]


def queue_received(original: Any, scheduler: Any, received: Sequence[Any]) -> None:
    """Around `Scheduler.process_input_requests`: end a request that cannot be queued."""
    containment = _active(scheduler)
    if containment is None or not received:
        return original(scheduler, received)
    for received_request in received:
        try:
            original(scheduler, [received_request])
        except Exception as error:
            containment.refuse(received_request, error)
    return None


def add_report(_result: None, controller: Any, state: dict[str, Any]) -> None:
    """After SGLang has begun the state that /server_info shows: add `Containment.report`."""
    containment = getattr(controller.scheduler, ATTRIBUTE, None)
    if containment is not None:
        state["containment"] = containment.report()


def _active(scheduler: Any) -> Containment | None:
    """The scheduler's containment, if it is on."""
    containment = getattr(scheduler, ATTRIBUTE, None)
    return None if containment is None or containment.why_off is not None else containment


# -- what failed -----------------------------------------------------------------------------------


def unsupported_setting(scheduler: Any) -> str | None:
    """Return the setting with which failed steps are not contained; None if there is none."""
    parallel = get_parallel()
    settings = {
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
    return next((name for name, is_set in settings.items() if is_set), None)


class Failure(NamedTuple):
    """The requests and phase of a failed step.

    Attributes:
        requests: the suspects, one or more of which may have caused the failure.
        prefills: whether the step was the first one of all these requests.
    """

    requests: list[Any]
    prefills: bool


def failure_of(error: BaseException, scheduler: Any) -> Failure | None:
    """Find the failed step in the frames of an error. None if no request can have caused it."""
    names = frames_of(error)
    for method, local in BATCH_OF.items():
        batch = names.get(method, {}).get(local)
        if batch is not None:
            # A mixed batch also holds requests that decode.
            prefills = batch.forward_mode.is_extend() and not batch.decoding_reqs
            return Failure(list(batch.reqs), prefills)
    if PLANS not in names:
        return None
    if PLANS_PREFILL in names:
        frame_locals = names[PLANS_PREFILL]
        batch, request = frame_locals.get(NEW_BATCH), frame_locals.get(CANDIDATE)
        chosen = batch.reqs if batch is not None else frame_locals.get(ADMITTED)
        chosen = chosen or ([request] if request is not None else scheduler.waiting_queue)
        return Failure(list(chosen), prefills=True)
    batches = (scheduler.running_batch, scheduler.last_batch)
    return Failure(recovery.distinct(batch.reqs for batch in batches if batch), prefills=False)


def frames_of(error: BaseException) -> dict[str, Mapping[str, Any]]:
    """Return the local variables of each function that the error has left, by function name.

    Not those of the function that has caught it, `run_loop`: its frame lives on, and would keep
    what it is asked for here: the error, and with it the tensors of the failed step.
    """
    left = error.__traceback__ and error.__traceback__.tb_next
    frames = [frame for frame, _ in traceback.walk_tb(left)]
    return {frame.f_code.co_name: frame.f_locals for frame in frames}


def error_place(error: BaseException) -> str:
    """Return the type of an error and the line that raised it, which failures of a kind share."""
    innermost = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} at {innermost.filename}:{innermost.lineno}"


class Containment:
    """Contains the failures of one scheduler.

    Attributes:
        why_off: the setting that turns containment off; None if it is on.
        steps: number of contained failures.
        ended: number of requests that were ended.
        last_error: type and message of the last contained error.
        result: the batch whose result was processed last, as it was before.
    """

    def __init__(self, scheduler: Any, why_off: str | None = None) -> None:
        self.why_off, self.steps, self.ended = why_off, 0, 0
        self.last_error: str | None = None
        self.result: list[recovery.RequestSnapshot] = []
        self._scheduler = scheduler
        self._probation: Probation | None = None
        self._logged_places: set[str] = set()
        self._in_a_row = self._planned = 0
        # The requests in flight when planning began: SGLang drops some before it has a batch.
        self._before: list[list[Any]] = []
        self._ranks: Any = None
        if why_off is None and get_parallel().tp_size > 1:
            # A group of its own, because ranks that do not fail wait in collectives of the other
            # groups. The limit is how long a failed rank waits for the others to fail.
            limit = timedelta(seconds=10)
            self._ranks = torch.distributed.new_group(backend="gloo", timeout=limit)
        self._series = _series(scheduler)

    def report(self) -> dict[str, Any]:
        """The fields of `containment` in /server_info."""
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
        self._check_ranks_agree(error, failure)
        frames = frames_of(error)
        if "process_batch_result" in frames:
            recovery.undo(self.result, frames)
        if failure is None or not failure.requests or isinstance(error, torch.AcceleratorError):
            raise error
        suspects = [request for request in failure.requests if not request.finished()]
        # This raises if the device is lost.
        s.device_module.synchronize()
        self._in_a_row, self._planned = self._in_a_row + 1, 0
        guilty = self._find_guilty(suspects, failure.prefills, error)
        self._log_failure(error, f"{len(guilty) or 'no'} of {len(suspects)} requests ended")
        requests = recovery.in_flight(s, [failure.requests, *self._before])
        reason = f"The step that served this request failed: {_short(error)}"
        self._add_to_counts(recovery.recover(s, requests, guilty, reason))
        self._before = []
        if self._in_a_row % PATIENCE == 0:
            self._try_a_plain_request()

    def refuse(self, received: Any, error: Exception) -> None:
        """End the requests of an input that could not be queued. Raises the error if the input
        holds no request, as a failed weight update does."""
        tokenized = self._scheduler._tokenized_requests(received)
        self._check_ranks_agree(error, Failure([], prefills=True))
        if not tokenized or isinstance(error, torch.AcceleratorError):
            raise error
        self._log_failure(error, "before the request was queued")
        reason = f"This request cannot be queued: {_short(error)}"
        self._add_to_counts(recovery.end_unqueued(self._scheduler, tokenized, reason))

    @contextmanager
    def planning(self) -> Iterator[None]:
        """Remember the requests in flight. During a probation, hide those that are not admitted."""
        s = self._scheduler
        self._planned += s.last_batch is not None
        # Under overlap, the result of a step is processed after the next is planned.
        if self._planned > 2:
            self._in_a_row = 0
        admitted = self._admitted()
        queue, last_requests = s.waiting_queue, [] if s.last_batch is None else s.last_batch.reqs
        self._before = [queue, s.running_batch.reqs, last_requests, [s.chunked_req]]
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
        """Return the requests that may be scheduled; None for all. Ends the probation when all
        requests have passed."""
        requests = recovery.in_flight(self._scheduler, []) if self._probation is not None else []
        while self._probation is not None and self._probation.passed(requests):
            was_alone = self._probation.is_alone
            if self._probation.advance():
                self._probation = None
            elif was_alone:
                # Queue it again while others are tried.
                recovery.recover(self._scheduler, requests, (), "")
                requests = recovery.in_flight(self._scheduler, [])
        return None if self._probation is None else self._probation.admitted

    def _find_guilty(self, suspects: list[Any], prefills: bool, error: Exception) -> list[Any]:
        """Return the requests to end now. Others of the failed step are put on probation."""
        probation = self._probation
        if not suspects:
            return []  # The failed request has finished: `recover` sends its answer or ends it.
        if probation is None or not any(r in probation.admitted for r in suspects):
            # The most tokens that the failed step, and under overlap the one before, could give.
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

    def _check_ranks_agree(self, error: Exception, failure: Failure | None) -> None:
        """Raise the error unless all ranks have failed at the same place."""
        if self._ranks is None:
            return
        state = None if failure is None else [(r.rid, len(r.output_ids)) for r in failure.requests]
        own_failure = (self._scheduler.forward_ct, error_place(error), state)
        failures: list[Any] = [None] * self._ranks.size()
        try:
            torch.distributed.all_gather_object(failures, own_failure, group=self._ranks)
        except RuntimeError:
            raise error from None
        if any(other != own_failure for other in failures):
            raise error

    def _log_failure(self, error: Exception, outcome: str) -> None:
        """Log the failure, with a traceback if it is the first one at its place."""
        self.last_error = _short(error)
        place = error_place(error)
        was_logged = place in self._logged_places
        self._logged_places.add(place)
        logger.error(
            "contained a failed step (%s): %s%s", outcome, self.last_error,
            "" if was_logged else "; further ones of this kind are logged without a traceback",
            exc_info=None if was_logged else error,
        )  # fmt: skip

    def _try_a_plain_request(self) -> None:
        """Queue a plain request. It fails only if every step fails, whatever the request."""
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

    def _add_to_counts(self, ended: int) -> None:
        self.steps, self.ended = self.steps + 1, self.ended + ended
        for series, change in zip(self._series, (1, ended), strict=False):
            series.inc(change)


# SGLang does not pass on the answer to a request with this prefix.
PLAIN_REQUEST = f"{HEALTH_CHECK_RID_PREFIX}_after_failures"


def _short(error: BaseException) -> str:
    return f"{type(error).__name__}: {cut(str(error))}"


def _series(scheduler: Any) -> list[Any]:
    """Return the counters of `SERIES`, in order. Empty without --enable-metrics."""
    reporter = scheduler.metrics_reporter
    if not reporter.enable_metrics or not reporter.current_scheduler_metrics_enabled:
        return []
    # Imported late: SGLang first sets the directory in which its processes share metrics.
    from prometheus_client import Counter

    labels = reporter.metrics_collector.labels
    series = [Counter(f"sglang_dflash_{name}", text, [*labels]) for name, text in SERIES.items()]
    return [counter.labels(**labels) for counter in series]
