"""Memory of draft steps and of prompts, measured on fake tensors at published shapes."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from experiments.kernel_traffic import StepContents
from experiments.launches import record_launches
from sglang_dflash.drafting.attention.backend import Backend
from sglang_dflash.drafting.attention.capabilities import Capabilities
from sglang_dflash.drafting.attention.paged import PagedAttention
from sglang_dflash.drafting.attention.table import RequestSlots
from sglang_dflash.drafting.drafter import PromptWrites
from sglang_dflash.drafting.groups import ContextWrite
from sglang_dflash.drafting.options import MOST_WAITING_STEPS
from sglang_dflash.drafting.pending_context import PendingContext
from sglang_dflash.tools.gpu_check.floors import config_of
from tests.alive import Alive
from tests.serving.start import test_draft_memory
from tests.serving.start.test_draft_memory import (
    BACKENDS,
    CUDA,
    POSITIONS,
    RUNNING,
    drafter_of,
    needs,
    plan_for,
)

_a_gpus_processors = test_draft_memory._a_gpus_processors


@pytest.mark.parametrize(("window", "blocks"), [(None, 1), (1024, 1), (1024, 4)])
@pytest.mark.parametrize("backend", ["triton", "pages"])
@pytest.mark.parametrize("shape", ["Qwen3-8B-DFlash-b16", "Qwen3.5-35B-A3B-DFlash"])
def test_a_step_takes_no_more_than_was_reserved(
    shape: str, backend: str, window: int | None, blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measure proposal and commit of the largest batch on fake tensors, at published shapes."""
    if backend == "pages":
        monkeypatch.setitem(
            BACKENDS,
            "pages",
            Backend(
                Capabilities(scratch=True),
                lambda sizes: PagedAttention(
                    sizes.layers, sizes.load.draft_block, sizes.scratch,
                    lambda q, *_: torch.empty_like(q), sizes.holes,
                ),
            ),
        )  # fmt: skip
    with FakeTensorMode(), torch.no_grad():
        plan = plan_for(backend, window, config_of(f"z-lab/{shape}"), CUDA, blocks)
        needed = needs(plan)
        block, config = plan.options.verify_block, plan.model.config
        drafter = drafter_of(plan, RUNNING * POSITIONS)
        rows = torch.arange(RUNNING, device=CUDA)
        known = RequestSlots(
            torch.zeros(RUNNING, POSITIONS, dtype=torch.int32, device=CUDA), rows, rows, POSITIONS
        )
        tokens = torch.arange(RUNNING * block, device=CUDA)
        hidden = plan.model.fc.weight.new_empty(len(tokens), config.target_hidden_width)
        alive = Alive()
        with record_launches(StepContents([POSITIONS] * RUNNING)), alive:
            drafter.propose(rows, known)
            proposal, alive.most = alive.most, 0
            drafter.absorb(hidden, tokens, tokens, committed=tokens > 3)
            commit = alive.most
    step = needed.logits + needed.activations + needed.context_tables
    assert proposal <= step and commit <= needed.projection
    # And it is no guess: half of it would not do.
    assert proposal > needed.logits > 0.3 * step


@pytest.mark.parametrize("window", [None, 1024], ids=["all", "window"])
@pytest.mark.parametrize("shape", ["Qwen3-8B-DFlash-b16", "Qwen3.5-35B-A3B-DFlash"])
def test_a_long_prompt_takes_no_more_than_was_reserved(shape: str, window: int | None) -> None:
    """A chunk of 8,192 tokens: with a window, hidden states of some are gathered."""
    with FakeTensorMode(), torch.no_grad():
        plan = plan_for("triton", window, config_of(f"z-lab/{shape}"), CUDA)
        needed, config = needs(plan), plan.model.config
        drafter = drafter_of(plan, 2 * 8192)
        hidden = plan.model.fc.weight.new_empty(8192, config.target_hidden_width)
        tokens = torch.arange(8192, device=CUDA)
        rows = None if window is None else tokens[:5000].flip(0)
        count = len(tokens if rows is None else rows)
        # Narrower groups write the last of what the widest one writes.
        parts = [tokens[count - 100 : count]] * (len(drafter.groups) - 1)
        writes = [ContextWrite(), *(ContextWrite(part, 100) for part in parts)]
        alive = Alive()
        with record_launches(StepContents([POSITIONS] * RUNNING)), alive:
            drafter.absorb(
                hidden, tokens[:count], tokens[:count], prompt=PromptWrites(rows, writes)
            )
    # Numbers of entries, and what finds them, are small beside it.
    assert 0.4 * needed.projection < alive.most <= 1.1 * needed.projection


@pytest.mark.parametrize("shape", ["Qwen3-8B-DFlash-b16", "Qwen3.5-35B-A3B-DFlash"])
def test_hidden_states_that_wait_take_no_more_than_was_reserved(shape: str) -> None:
    """Hidden states of plain steps wait until they are absorbed together."""
    with FakeTensorMode(), torch.no_grad():
        plan = plan_for("triton", 1024, config_of(f"z-lab/{shape}"), CUDA)
        needed = needs(plan, widths=(1,))
        waiting = PendingContext(drafter_of(plan, RUNNING * POSITIONS), plan.most_waiting_steps)
        width = plan.model.config.target_hidden_width
        hidden = plan.model.fc.weight.new_empty(RUNNING, width)
        rows = torch.arange(RUNNING, device=CUDA)[:, None]
        alive = Alive()
        with record_launches(StepContents([POSITIONS] * RUNNING)), alive:
            for _ in range(MOST_WAITING_STEPS - 1):
                waiting.add(range(RUNNING), hidden, rows, rows)
            kept = alive.most
            waiting.add(range(RUNNING), hidden, rows, rows)
    assert kept > 0.4 * needed.waiting_hidden
    assert alive.most <= needed.waiting_hidden + needed.projection
    assert needs(plan).waiting_hidden == 0
