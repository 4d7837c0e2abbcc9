"""The request that is guilty of a failed step, without a server."""

from __future__ import annotations

import copy
import inspect
import random
import weakref
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sglang_dflash.plugins.repairs import containment, recovery
from sglang_dflash.plugins.repairs.containment import BATCH_OF, Containment, Failure, failure_of
from sglang_dflash.plugins.repairs.probation import Probation
from tests.patches.originals import original


def request(rid: str, output: int = 0) -> Any:
    return SimpleNamespace(rid=rid, output_ids=[0] * output, finished=lambda: False)


def batch(*requests: Any, prefill: bool = False, decoding: Any = None) -> Any:
    mode = ForwardMode.EXTEND if prefill else ForwardMode.DECODE
    return SimpleNamespace(reqs=list(requests), forward_mode=mode, decoding_reqs=decoding)


class Scheduler:
    """A fake of SGLang's `Scheduler`: the attributes that are read."""

    def __init__(self, *waiting: Any, running: Any = None) -> None:
        self.waiting_queue, self.running_batch = list(waiting), running or batch()
        self.last_batch = self.cur_batch_for_debug = self.chunked_req = None
        self.result_queue: list[Any] = []
        self.grammar_manager = SimpleNamespace(grammar_queue=[])
        self.session_controller = SimpleNamespace(get=lambda _: None)
        self.metrics_reporter = SimpleNamespace(enable_metrics=False)
        self.aborted: list[Any] = []

    def requeue(self, found: list[Any]) -> None:
        self.waiting_queue, self.running_batch, self.last_batch = found, batch(), None

    def send_abort_output(self, abort: Any, _request: Any) -> None:
        self.aborted.append(abort)

    def run_batch(self, batch: Any) -> None:
        raise KeyError("run")

    def get_next_batch_to_run(self, inner: str) -> None:
        getattr(self, inner)()

    def _get_new_batch_prefill_raw(self) -> None:
        for req in self.waiting_queue[:2]:
            assert req.rid != "b", "a bad request"

    def update_running_batch(self) -> None:
        raise RuntimeError("no memory")

    def on_idle(self) -> None:
        raise RuntimeError("a leak")

    @staticmethod
    def _tokenized_requests(received: Any) -> Any:
        return received.batch


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(containment, "get_parallel", lambda: SimpleNamespace(tp_size=1))
    spec = SimpleNamespace(speculative_num_draft_tokens=8)
    monkeypatch.setattr(containment, "get_spec", lambda: spec)

    def make(scheduler: Scheduler) -> Containment:
        made = Containment(scheduler)
        setattr(scheduler, containment.ATTRIBUTE, made)
        return made

    return make


def raised(call: Any, *args: Any) -> Exception:
    with pytest.raises(Exception) as found:
        call(*args)
    return found.value


def test_probation_ends_a_guilty_one_and_no_other() -> None:
    """Whoever the guilty are, alone or as a pair, at once or later; and a fault of no request's
    making costs none."""
    for seed in range(1000):
        chance = random.Random(seed)
        suspects = [request(f"{i}", chance.randrange(5)) for i in range(chance.randint(1, 9))]
        guilty = chance.sample(suspects, chance.randint(0, min(2, len(suspects))))
        as_pair = len(guilty) == 2 and chance.random() < 0.5
        late = 0 if as_pair else chance.choice((0, 7))
        stray = chance.randrange(12) if not guilty else None
        assert (ended := verdict(suspects, guilty, as_pair, late, stray)) is None or ended in guilty
        assert late or bool(guilty) == (ended is not None)


def verdict(
    suspects: list[Any], guilty: list[Any], as_pair: bool, late: int, stray: int | None
) -> Any:
    """Return the ended request, or None. A guilty one fails from `late` output tokens on."""
    probation = Probation(suspects, missing=3)
    for step in range(200):
        inside = [r for r in guilty if r in probation.admitted and len(r.output_ids) >= late]
        if step == stray or (len(inside) == 2 if as_pair else inside):
            if (ended := probation.failed()) is not None:
                return ended
            continue
        for one in probation.admitted:
            one.output_ids += [0, 0]
        while probation.passed(suspects):
            if probation.advance():
                return None
    raise AssertionError("no end")


def test_probation_waits_for_no_one_who_is_gone() -> None:
    aborted, other = request("a"), request("b")
    assert not Probation([aborted, other], 1).passed([aborted, other])
    assert Probation([other, aborted], 1).passed([other])


def test_the_frames_of_an_error_tell_what_failed() -> None:
    a, b, c = request("a"), request("b"), request("c")
    s = Scheduler(a, b, c, running=batch(c))
    assert failure_of(raised(s.run_batch, batch(a, prefill=True)), s) == Failure([a], True)
    assert failure_of(raised(s.run_batch, batch(a, b)), s) == Failure([a, b], False)
    mixed = batch(a, b, prefill=True, decoding=[b])
    assert failure_of(raised(s.run_batch, mixed), s) == Failure([a, b], False)
    plan = s.get_next_batch_to_run
    assert failure_of(raised(plan, "_get_new_batch_prefill_raw"), s) == Failure([b], True)
    assert failure_of(raised(plan, "update_running_batch"), s) == Failure([c], False)
    # SGLang's own checks of its pools, say.
    assert failure_of(raised(s.on_idle), s) is None


MANAGERS = "sglang.srt.managers"
SCHEDULER = f"{MANAGERS}.scheduler.Scheduler"
PROCESSOR = "batch_result_processor.SchedulerBatchResultProcessor"
STREAMER = "output_streamer.SchedulerOutputStreamer"
# Of SGLang's functions whose frames are read: the locals that are looked for, and their types.
READ: dict[str, dict[str, Any]] = {
    **{f"{SCHEDULER}.{name}": {local: ScheduleBatch} for name, local in BATCH_OF.items()},
    f"{SCHEDULER}.{containment.PLANS}": {},
    f"{SCHEDULER}.{containment.PLANS_PREFILL}": dict.fromkeys(
        (containment.NEW_BATCH, containment.ADMITTED, containment.CANDIDATE)
    ),
    **{
        f"{MANAGERS}.scheduler_components.{PROCESSOR}.{name}": {recovery.IN_LOOP: None}
        for name in recovery.RESULT_LOOPS
    },
    f"{MANAGERS}.scheduler_components.{STREAMER}.{recovery.COLLECTS}": {},
}


@pytest.mark.parametrize("path", READ)
def test_what_is_read_of_a_frame_has_that_name_in_sglang(path: str) -> None:
    """With another name, the guilty would be looked for among all that run."""
    function = inspect.unwrap(original(path))
    assert function.__code__.co_name == path.rpartition(".")[2]
    assert {*READ[path]} <= {*function.__code__.co_varnames, *function.__code__.co_cellvars}
    parameters = inspect.signature(function).parameters
    for local, kind in READ[path].items():
        assert kind is None or parameters[local].annotation in (kind, kind.__name__)


def test_suspects_are_admitted_step_by_step(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others wait, whatever the scheduler takes or adds, and however its planning ends."""
    a, b, c = request("a"), request("b"), request("c")
    s = Scheduler(c, a, b)
    contained = made(s)
    monkeypatch.setattr(recovery, "recover", lambda scheduler, found, *_: scheduler.requeue(found))
    assert contained._find_guilty([a, b], True, KeyError()) == []

    def planned(scheduler: Scheduler, **_: Any) -> Any:
        seen, scheduler.waiting_queue = scheduler.waiting_queue, []
        scheduler.running_batch = batch(*seen)
        return seen

    assert containment.plan_batch(planned, s, running_batch=None) == [b]
    assert s.waiting_queue == [c, a]
    b.output_ids = [1]
    assert containment.plan_batch(planned, s) == [a]
    a.output_ids = [1, 2]
    compiled = s.grammar_manager.grammar_queue = [request("d")]
    with pytest.raises(KeyError):
        containment.plan_batch(lambda *_, **__: {}["x"], s)
    assert s.grammar_manager.grammar_queue is compiled
    assert set(map(id, s.waiting_queue)) == {id(a), id(b), id(c)}
    assert [r.rid for r in containment.plan_batch(planned, s)] == ["a", "b"]
    a.output_ids, b.output_ids = [1] * 3, [1] * 3
    assert containment.plan_batch(planned, s) == [c]


def test_a_request_that_cannot_be_queued_is_ended(made: Any) -> None:
    def original(scheduler: Scheduler, received: list[Any]) -> None:
        for one in received:
            for tokenized in one.batch:
                if tokenized.rid == "bad":
                    raise TypeError("no such thing")
                scheduler.waiting_queue.append(tokenized)

    def tokenized(*rids: str) -> Any:
        return SimpleNamespace(batch=[SimpleNamespace(rid=r, session_params=None) for r in rids])

    s = Scheduler()
    contained = made(s)
    containment.queue_received(
        original, s, [tokenized("a"), tokenized("b", "bad", "c"), tokenized("d")]
    )
    assert [r.rid for r in s.waiting_queue] == ["a", "b", "d"]
    assert [abort.rid for abort in s.aborted] == ["bad", "c"]
    # An equal number would not do: SGLang's streams show the error of an `HTTPStatus` only.
    assert s.aborted[0].finished_reason["status_code"] is HTTPStatus.INTERNAL_SERVER_ERROR
    assert "no such thing" in s.aborted[0].finished_reason["message"]
    report = contained.report()
    assert (report["contained_steps"], report["ended_requests"]) == (1, 2)

    def control(_scheduler: Scheduler, _received: list[Any]) -> None:
        raise RuntimeError("half of the weights are new")

    # An update of the weights that fails leaves nothing that could serve.
    with pytest.raises(RuntimeError, match="half of the weights"):
        containment.queue_received(control, s, [SimpleNamespace(batch=())])


def test_the_memory_of_a_failed_step_is_free_when_the_next_one_begins(
    made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that had too little memory would leave less for those that are tried after it."""
    monkeypatch.setattr(containment, "unsupported_setting", lambda _: None)
    monkeypatch.setattr(recovery, "recover", lambda *_: 0)
    # Pytest keeps what is logged, and with it the error.
    monkeypatch.setattr(Containment, "_log_failure", lambda *_: None)
    s: Any = Scheduler()
    s.device_module = SimpleNamespace(synchronize=lambda: None)
    made(s)
    tensors = list[weakref.ref[Any]]()

    def run_batch(batch: Any) -> None:
        activations = torch.zeros(8)
        tensors.append(weakref.ref(activations))
        raise torch.OutOfMemoryError(f"{len(activations)} more")

    def loop(_scheduler: Any) -> None:
        if not tensors:
            run_batch(batch(request("a")))

    containment.run_loop(loop, s)
    assert getattr(s, containment.ATTRIBUTE).steps == len(tensors) == 1
    assert tensors[0]() is None


@pytest.mark.parametrize("kind", ["no request", "a device"])
def test_what_no_request_can_have_caused_ends_the_server(kind: str, made: Any) -> None:
    a = request("a")
    s = Scheduler(a, running=batch(a))
    errors = {"no request": RuntimeError("a leak"), "a device": torch.AcceleratorError("lost")}
    with pytest.raises(type(errors[kind])):
        made(s).contain(errors[kind])


def test_in_flight_finds_each_request_once() -> None:
    a, b, c, d, e = (request(name) for name in "abcde")
    s = Scheduler(a, running=batch(b))
    s.last_batch, s.chunked_req, s.result_queue = batch(b, c), d, [(batch(c), None)]
    assert recovery.in_flight(s, [[e], [None, a]]) == [b, c, d, e, a]


class Result:
    """Requests of a batch, each with a new token, in loops of SGLang's names."""

    def __init__(self, fails_at: str) -> None:
        self.fails_at, self.sent = fails_at, []
        logprob = {"output_token_logprobs_val": [0.5], "input_token_logprobs_val": [1.0]}
        self.requests = [self._request(name, copy.deepcopy(logprob)) for name in "abc"]

    def _request(self, name: str, logprob: dict[str, list[float]]) -> Any:
        made = request(name, 1)
        sent = dict.fromkeys(recovery.SENT, 0)
        vars(made).update(sent, session=None, return_logprob=True, finished_reason=None)
        values = SimpleNamespace(__slots__=tuple(logprob), **logprob)
        vars(made).update(logprob=values, finished_len=None, reasoning_tokens=0)
        return made

    def process_batch_result(self) -> None:
        self.process_batch_result_decode()

    def process_batch_result_decode(self) -> None:
        for req in self.requests:
            req.output_ids.append(7)
            req.reasoning_tokens += 1
            req.finished_reason = "stop"
            if req.rid == self.fails_at:
                raise KeyError
            req.logprob.output_token_logprobs_val.append(0.25)
        self._stream_output_generation()
        raise KeyError

    def _stream_output_generation(self) -> None:
        for req in self.requests:
            req.send_token_offset = 2
            if self.fails_at == f"send {req.rid}":
                raise KeyError


@pytest.mark.parametrize("fails_at", ["a", "b", "c", "send a", "send b", "after"])
def test_a_result_processed_in_part_is_undone(fails_at: str) -> None:
    result = Result(fails_at)
    before = [recovery.RequestSnapshot.of(one) for one in result.requests]
    recovery.undo(before, containment.frames_of(raised(result.process_batch_result)))
    for one in result.requests:
        done = fails_at not in "abc" or fails_at > one.rid
        assert len(one.output_ids) == len(one.logprob.output_token_logprobs_val) == 1 + done
        assert one.finished_reason == ("stop" if done else None)
        assert one.reasoning_tokens == done
        assert one.logprob.input_token_logprobs_val == [1.0]
        # What was sent is not sent again, and what was not is.
        assert one.send_token_offset == (2 if fails_at == "after" else 0)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({}, None),
        ({"enable_flexkv": True}, "an external cache"),
        ({"radix_cache_backend": "mine"}, "an external cache"),
    ],
)
def test_caches_that_copy_by_themselves_turn_it_off(
    given: dict[str, Any], named: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pool that is emptied while they copy would get, or give, K/V of other tokens."""
    parallel = SimpleNamespace(pp_size=1, attn_dp_enabled=False)
    monkeypatch.setattr(containment, "get_parallel", lambda: parallel)
    own: Any = SimpleNamespace(
        server_args=SimpleNamespace(
            **{"enable_flexkv": False, "radix_cache_backend": None, **given}
        ),
        disaggregation_mode=containment.DisaggregationMode.NULL, dllm_config=None,
        is_generation=True,
        **dict.fromkeys((
            "enable_pdmux", "enable_overlap_mlx", "enable_hisparse", "enable_hierarchical_cache",
            "enable_lmcache", "enable_unified_cache_external_linker",
        ), False),
    )  # fmt: skip
    assert containment.unsupported_setting(own) == named


def test_grammars_that_are_compiled_stay_if_the_pools_cannot_be_emptied() -> None:
    def flush_cache(empty_cache: bool) -> bool:
        assert s.grammar_manager.grammar_queue == [] and not empty_cache
        raise KeyError("a pool")

    s: Any = Scheduler()
    compiled = s.grammar_manager.grammar_queue = [request("a")]
    s.model_worker = SimpleNamespace(last_shared_read_runner=SimpleNamespace())
    s.flush_cache = flush_cache
    with pytest.raises(KeyError):
        recovery.recover(s, [], [], "a bug")
    assert s.grammar_manager.grammar_queue is compiled


def test_the_next_barrier_is_not_that_of_a_failed_forward() -> None:
    """The event that tells when a forward has read what the scheduler writes next."""
    from sglang.srt.managers.scheduler import Scheduler as SGLangs

    s: Any = Scheduler()
    runner = SimpleNamespace(shared_read_done_event="of the failed forward")
    s.model_worker = SimpleNamespace(last_shared_read_runner=runner)
    s.flush_cache = lambda empty_cache: True
    assert recovery.recover(s, [], [], "a bug") == 0
    # A backend that publishes no event: the whole forward is waited for.
    waited, s._war_barrier_enabled, s.forward_stream = list[Any](), True, "the forward"
    s.schedule_stream = SimpleNamespace(wait_event=waited.append, wait_stream=waited.append)
    SGLangs._apply_war_barrier(s)
    assert waited == ["the forward"]
