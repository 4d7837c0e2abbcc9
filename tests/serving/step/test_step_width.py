"""Verify widths in the worker: what the policy is told, and what the drafter gets of each width."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_dflash.drafting.options import Options
from sglang_dflash.drafting.parallel import TensorParallel
from sglang_dflash.drafting.width import AdaptiveWidth, TimedStep, WidthPolicy
from sglang_dflash.serving.start.flags import ATTRIBUTE, width_policy
from sglang_dflash.serving.step import batch as serving_batch
from sglang_dflash.serving.step import width as step_width
from sglang_dflash.serving.step.batch import ForwardBatch
from sglang_dflash.serving.step.target_tokens import takes_one_token
from sglang_dflash.serving.step.width import StepClock, StepWidths
from tests.errors import refused
from tests.serving.batches import batch_of, request_of
from tests.serving.in_process import decode_of, draft_kv, filled, prefill_of, widths_of, worker_of
from tests.serving.step.test_worker import LENGTHS, slots_of

# In every entry of the draft KV cache before the prompts are written.
STALE = 777.0


class Scripted(WidthPolicy):
    """Takes its widths from a list, and keeps what it is told."""

    def __init__(self, widths: Iterable[int]) -> None:
        self.widths = (1, 4, 8)
        self._next = iter(widths)
        self.asked: list[tuple[list[Hashable], int, int, int]] = []
        self.durations: list[TimedStep] = []
        self.outcomes: list[tuple[int, dict[Hashable, int]]] = []

    def choose(self, rids: Sequence[Hashable], context: int, most: int, undrafted: int = 0) -> int:
        self.asked.append((list(rids), context, most, undrafted))
        return next(self._next)

    def record(self, step: TimedStep) -> None:
        self.durations.append(step._replace(seconds=round(step.seconds, 6)))

    def observe(self, rids: Sequence[Hashable], width: int, accepted: Sequence[int]) -> None:
        self.outcomes.append((width, dict(zip(rids, accepted, strict=True))))

    def report(self) -> Mapping[str, Any]:
        return {}


def request(rid: str, most: int = 100, output: int = 0, processor: str | None = None) -> Any:
    """A request with 500 tokens in all, `output` of them generated."""
    return request_of(
        rid, 500 - output, output, custom_logit_processor=processor, max_new_tokens=most
    )


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """Seconds that `time.perf_counter` returns next."""
    readings: list[float] = []
    readout = SimpleNamespace(perf_counter=lambda: readings.pop(0))
    monkeypatch.setattr(step_width, "time", readout)
    yield readings


def test_the_policy_is_told_what_a_step_may_take(clock: list[float]) -> None:
    clock += [1.0]
    policy = Scripted([4])
    widths = widths_of(policy)
    batch = batch_of(
        request("a", most=10, output=7),
        request("b", most=10, output=4, processor="one"),
    )
    width = widths.choose(batch, [takes_one_token(request) for request in batch.reqs])
    assert width == 4 and policy.asked == [(["a"], 500, 6, 1)]


def test_only_uninterrupted_steps_are_timed(clock: list[float]) -> None:
    clock += [1.0, 1.25, 9.0, 9.5]
    policy = Scripted([8, 1, 4, 4])
    widths, one = widths_of(policy), batch_of(request("a"))
    for interrupted in (False, False, True, False):
        if interrupted:
            widths.clock.drop_step()
        widths.choose(one, [False])
    assert policy.durations == [(0.25, 1, 500, 8), (0.5, 1, 500, 4)]


def test_the_pause_before_requests_of_another_server_is_no_step(clock: list[float]) -> None:
    """A decode server runs no prefill that would stop the clock before an idle minute ends."""
    clock += [1.0, 61.0, 61.5]
    policy = Scripted([4, 4, 4])
    worker = worker_of(widths=widths_of(policy))
    filled(worker, LENGTHS)
    for arrives in (False, True, False):
        batch = decode_of(LENGTHS)
        if arrives:
            batch.spec_info.future_indices = None
            worker.seeds.note = lambda _: None
            worker.take_over(batch)
        worker.forward_batch_generation(batch)
    assert [step.seconds for step in policy.durations] == [0.5]


def test_every_rank_takes_the_first_ones_width(clock: list[float]) -> None:
    clock += [1.0]
    tp = TensorParallel(rank=1, size=2, from_first=lambda own: {4: 8}[own])
    assert widths_of(Scripted([4]), tp).choose(batch_of(request("a")), [False]) == 8


def test_a_fixed_width_asks_nothing() -> None:
    widths = widths_of(WidthPolicy(8))
    assert widths.choose(None, []) == 8  # type: ignore[arg-type]
    widths.observe(8, {"a": 3})


# -- what the drafter gets


@pytest.fixture
def _decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace SGLang's preparation of a step of width 1."""
    monkeypatch.setattr(serving_batch, "prepare_mamba_track_for_verify", lambda _batch: None)
    monkeypatch.setattr(
        ForwardBatch, "init_new", lambda batch, *_, **__: SimpleNamespace(tokens=len(batch.reqs))
    )


def steps_of(widths: Sequence[int], window: int | None, waiting: int = 16) -> tuple[Any, list[int]]:
    """A worker after the prefill and a step of each width, and the committed lengths."""
    torch.manual_seed(1)
    worker = worker_of(window, widths=widths_of(Scripted(widths)), most_waiting_steps=waiting)
    worker.drafter.groups[0].cache.kv.fill_(STALE)
    return worker, run_steps(worker, widths)


def run_steps(worker: Any, widths: Sequence[int]) -> list[int]:
    """A prefill and a step of each width; the committed lengths."""
    filled(worker, LENGTHS)
    lengths = LENGTHS
    for width in widths:
        step = decode_of(lengths)
        step.reqs = [request("a"), request("b")]
        result = worker.forward_batch_generation(step)
        assert result.speculative_num_draft_tokens == width
        assert result.next_token_ids.shape == (2 * width,)
        assert step.spec_info is not None and step.seq_lens.tolist() == lengths
        lengths = result.new_seq_lens.tolist()
    return lengths


def test_a_step_that_fails_is_not_counted() -> None:
    """A contained one is computed again."""
    worker = filled(worker_of(), LENGTHS)
    forward, failures = worker.target_worker.forward_batch_generation, [RuntimeError("once")]

    def failing(*args: Any, **kwargs: Any) -> Any:
        if failures:
            raise failures.pop()
        return forward(*args, **kwargs)

    worker.target_worker.forward_batch_generation = failing
    with pytest.raises(RuntimeError, match="once"):
        worker.forward_batch_generation(decode_of(LENGTHS))
    assert worker.figures.report()["decode_steps"] == 0
    worker.forward_batch_generation(decode_of(LENGTHS))
    assert worker.figures.report()["width_steps"] == {"4": 1}


@pytest.mark.usefixtures("_decoded")
def test_a_step_is_not_charged_for_the_plain_steps_before_it() -> None:
    """Their hidden states are projected before its proposal."""
    widths, begun = [1, 1, 4, 4, 1], []

    class Clock(StepClock):
        def start_step(self) -> list[TimedStep]:
            begun.append("start")
            return super().start_step()

        def restart_step(self) -> None:
            begun.append("restart")

    steps = StepWidths(Scripted(widths), TensorParallel(), Clock(torch.device("cpu")))
    run_steps(worker_of(None, widths=steps), widths)
    assert begun == ["start", "start", "start", "restart", "start", "start"]


@pytest.mark.usefixtures("_decoded")
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("widths", [[1, 1, 1], [3, 1, 4], [1, 3, 1, 1]])
def test_every_committed_token_reaches_the_drafter(widths: list[int], window: int | None) -> None:
    """The same K/V whether the hidden states of plain steps wait or not."""
    written = []
    for waiting in (1, 16):
        worker, lengths = steps_of(widths, window, waiting)
        assert lengths[0] >= LENGTHS[0] + len(widths)
        # On a decode server nothing waits.
        assert not worker._pending_context.absorb() or waiting > 1
        written.append(draft_kv(worker, slots_of(lengths)))
    assert not (written[0] == STALE).any()
    torch.testing.assert_close(written[0], written[1])


@pytest.mark.usefixtures("_decoded")
def test_a_prefill_comes_after_what_waits() -> None:
    worker, lengths = steps_of([1, 1], None)
    newest = slots_of([0, lengths[1]])[-1:]
    assert (draft_kv(worker, newest) == STALE).all()
    # Of the first request: the newest token is the second one's.
    worker.forward_batch_generation(prefill_of([0], [LENGTHS[0]]))
    assert not (draft_kv(worker, newest) == STALE).any()


# -- flags


def policy_of(
    flags: dict[str, Any], settings: dict[str, Any] | None = None, block: int = 8, trained: int = 8
) -> WidthPolicy:
    """Return the policy of `--speculative-dflash-NAME` flags on a CPU with changed settings."""
    server_args = SimpleNamespace(
        **{ATTRIBUTE: {f"speculative_dflash_{name}": value for name, value in flags.items()}}
    )
    linear = ("linear_attn_backend", "linear_attn_decode_backend", "linear_attn_verify_backend")
    plain = {"enable_deterministic_inference": False, "device": "cpu", "enable_lora": None}
    plain |= dict.fromkeys(linear)
    options = Options(block, looks_up=True).for_trained_block(trained)
    return width_policy(server_args, SimpleNamespace(**(plain | (settings or {}))), options)


def test_default_widths_end_with_the_block() -> None:
    for trained, block, widths in (
        (2, 2, (1, 2)),
        (8, 4, (1, 4)),
        (8, 8, (1, 4, 8)),
        (16, 16, (1, 4, 8, 16)),
        (16, 40, (1, 4, 8, 16, 40)),
        (6, 32, (1, 4, 6, 8, 32)),
    ):
        policy = policy_of({"width": "adaptive"}, block=block, trained=trained)
        assert isinstance(policy, AdaptiveWidth) and policy.widths == widths


@pytest.mark.parametrize(
    ("settings", "adaptive"),
    [
        ({}, True),
        ({"enable_deterministic_inference": True}, False),
        ({"device": "cuda"}, False),
        ({"device": "xpu"}, False),
    ],
)
def test_auto_is_adaptive_on_a_cpu_that_can(settings: dict[str, Any], adaptive: bool) -> None:
    assert isinstance(policy_of({"width": "auto"}, settings), AdaptiveWidth) == adaptive
    assert type(policy_of({"width": "fixed"}, settings)) is WidthPolicy


REFUSED: dict[str, dict[str, Any]] = {
    "determinism": {"enable_deterministic_inference": True},
    "another device": {"device": "xpu"},
    "FlashInfer for recurrent layers": {
        "device": "cuda", "linear_attn_decode_backend": "flashinfer"
    },
    "LoRA on a GPU": {"device": "cuda", "enable_lora": True},
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_adaptive_is_refused_with_settings_that_exclude_it(name: str) -> None:
    with refused("--speculative-dflash-width", "adaptive"):
        policy_of({"width": "adaptive"}, REFUSED[name])


# -- how long steps take


A, B, C = (1, 500, 1), (2, 500, 4), (2, 600, 8)


class Stream:
    """Work of so many seconds in a row; events pass when `done` does. The host does not wait."""

    def __init__(self) -> None:
        self.enqueued = self.done = 0.0

    def event(self, enable_timing: bool = False) -> Any:
        assert enable_timing
        at: list[float] = []
        return SimpleNamespace(
            at=at,
            record=lambda: at.append(self.enqueued),
            query=lambda: at[0] <= self.done,
            elapsed_time=lambda later: 1e3 * (later.at[0] - at[0]),
        )


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Stream:
    made = Stream()
    module = SimpleNamespace(Event=made.event)
    monkeypatch.setattr(step_width.torch, "get_device_module", lambda _device: module)
    monkeypatch.setattr(step_width.time, "perf_counter", lambda: made.enqueued)
    return made


def test_a_step_has_the_time_that_the_device_worked_on_it(stream: Stream) -> None:
    """The host is a step ahead: by its own clock a wide step would be as long as the one before."""
    clock, found = StepClock(torch.device("cuda")), []
    for step, seconds, done in ((A, 1.0, 0.0), (C, 4.0, 0.0), (A, 1.0, 1.0), (B, 2.0, 6.0)):
        stream.done = done
        found.append(clock.start_step())
        clock.describe_step(*step)
        stream.enqueued += seconds
    assert found == [[], [], [(1.0, *A)], [(4.0, *C), (1.0, *A)]]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_other_work_counts_for_no_step(device: str, stream: Stream) -> None:
    """Between two steps, and at the beginning of one for those before it."""
    clock, stream.done = StepClock(torch.device(device)), 100.0
    assert clock.start_step() == []
    # Not known what it is.
    assert clock.start_step() == []
    clock.describe_step(*A)
    stream.enqueued += 1.0
    clock.drop_step()
    stream.enqueued += 50.0
    assert clock.start_step() == []
    clock.describe_step(*B)
    stream.enqueued += 2.0
    found = clock.start_step()
    clock.describe_step(*C)
    stream.enqueued += 7.0
    clock.restart_step()
    stream.enqueued += 4.0
    assert [*found, *clock.start_step()] == [(2.0, *B), (4.0, *C)]


@pytest.mark.parametrize("looks_up", [False, True])
def test_only_drafts_that_a_step_verifies_are_computed(
    looks_up: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, rows = worker_of(looks_up=looks_up, widths=widths_of(Scripted([2, 4]))), []
    head = worker.drafter.head
    monkeypatch.setattr(
        worker.drafter, "head", lambda hidden, *how: rows.append(hidden.shape) or head(hidden, *how)
    )
    run_steps(worker, [2, 4])
    assert [shape[:2] for shape in rows] == [(2, 2), (2, 4)]
