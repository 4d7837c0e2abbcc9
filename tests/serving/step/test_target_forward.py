"""The target at several widths: SGLang's runner has the width's backend and graphs while a step of
that width runs. (With SGLang's own runner: tests/engine/test_exactness.py.)"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt import runtime_context
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner

from sglang_dflash.serving.step import batch as our_batch
from sglang_dflash.serving.step import target_forward as our_forward
from sglang_dflash.serving.step.batch import DFlashVerifyInput
from sglang_dflash.serving.step.target_forward import (
    _WITH_INDEX_BUFFERS,
    TargetForward,
    TargetForwardByWidth,
    target_forward,
)
from tests.serving.in_process import prepared, widths_of, worker_of
from tests.serving.step.test_step_width import Scripted, run_steps

BLOCK = 4


class Graphs:
    """Stand-in for SGLang's runner of captured graphs."""

    def __init__(self, runner: Any, attn_backend: Any, speculative_num_draft_tokens: int) -> None:
        assert speculative_num_draft_tokens == runtime_context.get_spec().width
        self.attention, self.width = attn_backend, speculative_num_draft_tokens
        self.capture_bs = [1, 2]


class Runner:
    """The part of SGLang's runner that `TargetForwardByWidth` uses."""

    prefill_attention_backend_str = decode_attention_backend_str = "fa3"

    def __init__(self, has_graphs: bool) -> None:
        self.bound: list[Any] = []
        self.kv_index_translator = SimpleNamespace(bind_and_verify_backends=self.bound.extend)
        self.attn_backend = self._get_attention_backend()
        self.decode_cuda_graph_runner: Any = None
        if has_graphs:
            self.decode_cuda_graph_runner = Graphs(self, self.attn_backend, BLOCK)

    def _get_attention_backend(self) -> Any:
        return SimpleNamespace(width=runtime_context.get_spec().width)

    @property
    def state(self) -> tuple[int, int | None]:
        graphs = self.decode_cuda_graph_runner
        return self.attn_backend.width, None if graphs is None else graphs.width


@pytest.fixture(autouse=True)
def _spec(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's own number of draft tokens."""
    spec = SimpleNamespace(width=BLOCK, speculative_num_draft_tokens=BLOCK)

    @contextmanager
    def override(speculative_num_draft_tokens: int) -> Iterator[None]:
        spec.width = speculative_num_draft_tokens
        try:
            yield
        finally:
            spec.width = BLOCK

    spec.override = override
    for module in (runtime_context, our_batch, our_forward):
        monkeypatch.setattr(module, "get_spec", lambda: spec)


def by_width(runner: Any) -> TargetForwardByWidth:
    made = target_forward(SimpleNamespace(model_runner=runner), (1, 3, BLOCK), torch.device("cuda"))
    assert isinstance(made, TargetForwardByWidth)
    return made


@pytest.mark.parametrize("has_graphs", [True, False])
def test_a_step_has_the_backend_and_the_graphs_of_its_width(has_graphs: bool) -> None:
    runner = Runner(has_graphs)
    forward = by_width(runner)
    for width in (1, BLOCK, 3, 1):
        with forward.at(width):
            assert runner.state == (width, width if has_graphs else None)
        assert runner.state == (BLOCK, BLOCK if has_graphs else None)
    assert [backend.width for backend in runner.bound] == [3, 1]
    if has_graphs:
        with forward.at(1):
            assert runner.decode_cuda_graph_runner.attention is runner.attn_backend


def test_the_blocks_own_come_back_after_an_error() -> None:
    runner = Runner(True)
    forward = by_width(runner)
    with pytest.raises(ValueError, match="within"), forward.at(1):
        raise ValueError("within")
    assert runner.state == (BLOCK, BLOCK)


def test_graphs_are_captured_again_with_the_blocks() -> None:
    """An update of the target's weights may have moved them in memory."""
    runner = Runner(True)
    forward = by_width(runner)
    with forward.at(3):
        before = runner.decode_cuda_graph_runner
    again = runner.decode_cuda_graph_runner = Graphs(runner, runner.attn_backend, BLOCK)
    for _ in range(2):
        with forward.at(3):
            assert runner.decode_cuda_graph_runner is not before
        assert runner.decode_cuda_graph_runner is again
    assert [backend.width for backend in runner.bound] == [3, 1, 3, 1]


def test_graphs_are_gone_before_others_are_captured() -> None:
    """The memory that was reserved is that of one set."""
    runner = Runner(True)
    forward = by_width(runner)
    kept = [weakref.ref(runner.decode_cuda_graph_runner)]
    for width in (1, 3):
        with forward.at(width):
            kept.append(weakref.ref(runner.decode_cuda_graph_runner))
    alive: list[int] = []

    def backend() -> Any:
        alive.append(sum(graphs() is not None for graphs in kept))
        return SimpleNamespace(width=runtime_context.get_spec().width)

    runner._get_attention_backend = backend  # type: ignore[method-assign]
    # As SGLang does.
    runner.decode_cuda_graph_runner = None
    assert kept[0]() is None
    runner.decode_cuda_graph_runner = Graphs(runner, runner.attn_backend, BLOCK)
    with forward.at(3):
        assert runner.state == (3, 3)
    assert alive == [0, 0]


@pytest.mark.parametrize("width", [1, 3, BLOCK])
def test_after_a_failed_capture_no_width_has_anothers_backend(width: int) -> None:
    """Too little memory, and the server goes on: the step that follows captures again."""
    runner = Runner(True)
    forward, make = by_width(runner), runner._get_attention_backend

    def make_wide_ones_only() -> Any:
        if runtime_context.get_spec().width == 1:
            raise torch.OutOfMemoryError("for width 1")
        return make()

    runner.decode_cuda_graph_runner = Graphs(runner, runner.attn_backend, BLOCK)
    runner._get_attention_backend = make_wide_ones_only  # type: ignore[method-assign]
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError, match="for width 1"), forward.at(width):
            pytest.fail(f"a step of width {width} ran with the backend of {runner.state}")
    runner._get_attention_backend = make  # type: ignore[method-assign]
    with forward.at(width):
        assert runner.state == (width, width)
    assert runner.state == (BLOCK, BLOCK)


def test_a_width_that_was_not_made_is_refused() -> None:
    with pytest.raises(KeyError, match="2"), by_width(Runner(True)).at(2):
        pytest.fail("it ran with the block's backend")


def test_index_buffers_have_room_for_a_step_beyond_the_context() -> None:
    """Buffers of width 1 are as long as the context, and a wide step before may end behind it; so
    may any step behind FA3's page tables."""

    class TritonAttnBackend(SimpleNamespace):
        """Named as SGLang's."""

    class FlashAttentionBackend(SimpleNamespace):
        """Named as SGLang's."""

    runner = Runner(True)

    def hybrid() -> Any:
        own = TritonAttnBackend(max_context_len=96)
        paged = FlashAttentionBackend(max_context_len=96, page_size=16, max_num_pages=6)
        inner = SimpleNamespace(decode_backend=own, prefill_backend=paged)
        other = SimpleNamespace(max_context_len=96)
        return SimpleNamespace(
            full_attn_backend=inner, decode_backend=other, own=own, paged=paged, other=other
        )

    runner._get_attention_backend = hybrid  # type: ignore[method-assign]
    with by_width(runner).at(1):
        made = runner.attn_backend
    room = 96 + 2 * BLOCK
    assert (made.own.max_context_len, made.other.max_context_len) == (room, 96)
    assert (made.paged.max_context_len, made.paged.max_num_pages) == (room, 7)


@pytest.mark.parametrize(
    ("widths", "device"), [((BLOCK,), "cuda"), ((1, BLOCK), "cpu"), ((BLOCK,), "cpu")]
)
def test_one_backend_serves_all_widths_elsewhere(widths: tuple[int, ...], device: str) -> None:
    made = target_forward(SimpleNamespace(model_runner=None), widths, torch.device(device))
    assert type(made) is TargetForward


def test_sglang_takes_what_it_is_given() -> None:
    """Arguments are compared by name: another version of SGLang may have changed them."""
    graphs = inspect.signature(DecodeCudaGraphRunner.__init__).parameters
    assert {"attn_backend", "speculative_num_draft_tokens"} <= set(graphs)
    # Raises if it needs more than the runner.
    inspect.signature(ModelRunner._get_attention_backend).bind(None)
    source = inspect.getsource(ModelRunner)
    for name in ("attn_backend", "decode_cuda_graph_runner", "kv_index_translator"):
        assert f"self.{name}" in source
    folder = Path(inspect.getfile(ModelRunner)).parents[1] / "layers/attention"
    attention = [file.read_text() for file in folder.glob("*_backend.py")]
    for name in _WITH_INDEX_BUFFERS:
        (source,) = (text for text in attention if f"class {name}(" in text)
        assert "self.max_context_len" in source


class Rollback:
    """Notes the backend that each step's recurrent states are moved on with."""

    name, scratch_bytes = "replay", 0

    def __init__(self, runner: Any) -> None:
        self.runner = runner
        self.found: list[tuple[int, list[int]]] = []

    def commit(self, lengths: torch.Tensor, _checkpoints: Any) -> None:
        self.found.append((self.runner.attn_backend.width, lengths.tolist()))


def test_width_1_is_verified_and_recurrent_states_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    verified: list[tuple[int, int]] = []
    runner = Runner(True)

    def noted(verify_input: Any, batch: Any, worker: Any) -> Any:
        verified.append((verify_input.draft_token_num, runner.attn_backend.width))
        return prepared(verify_input, batch, worker)

    monkeypatch.setattr(DFlashVerifyInput, "prepare_for_verify", noted)
    torch.manual_seed(1)
    rollback, widths = Rollback(runner), [1, 3, BLOCK, 1]
    worker = worker_of(rollback=rollback, widths=widths_of(Scripted(widths)))
    worker.target_worker.model_runner = runner
    worker.target_forward = TargetForwardByWidth(worker.target_worker, (1, 3, BLOCK))
    run_steps(worker, widths)
    assert verified == [(width, width) for width in widths]
    assert [width for width, _ in rollback.found] == widths
    assert rollback.found[0][1] == rollback.found[-1][1] == [1, 1]
    assert runner.state == (BLOCK, BLOCK)
