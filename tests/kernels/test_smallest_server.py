"""The checks at start need no more than the smallest server has: one request, a block of two, a
ring of one entry, the smallest pool and context."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from dflash_kernels.draft_ops import TritonOps

from sglang_dflash.checkpoint.draft_config import DraftConfig
from sglang_dflash.drafting.attention.backend import Backend, Capabilities
from sglang_dflash.drafting.attention.paged import PagedAttention
from sglang_dflash.drafting.drafter import Drafter
from sglang_dflash.drafting.graphs import GraphedDrafter
from sglang_dflash.drafting.model import DraftModel
from sglang_dflash.drafting.ops import TorchOps
from sglang_dflash.drafting.options import Options
from sglang_dflash.drafting.recording_check import check_recording
from sglang_dflash.drafting.self_check import check_attention
from sglang_dflash.serving.gpu.backends import ATTENTION
from sglang_dflash.serving.start.plan import Plan
from sglang_dflash.tools.gpu_check.drafters import random_head
from tests.conftest import raw_config
from tests.drafting.test_paged_attention import plain_kernel
from tests.kernels.support import DEVICE
from tests.recording import OpRecorder

BLOCK = 2
BACKENDS = {
    "torch": ATTENTION["torch"],
    "triton": replace(ATTENTION["triton"], capabilities=Capabilities(capturable=True)),
    # As FA3 and FA4.
    "pages": Backend(
        Capabilities(capturable=True, scratch=True),
        lambda sizes: PagedAttention(
            sizes.layers, sizes.load.draft_block, sizes.scratch, plain_kernel, sizes.holes
        ),
    ),
}
MIXED = {
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "sliding_window": 3,
}


@pytest.mark.parametrize("ring", [None, 1], ids=["default-ring", "one-entry"])
@pytest.mark.parametrize(
    ("backend", "requests"),
    # The interpreter is slow, and a kernel has a program for each request, however many.
    [(name, count) for name in BACKENDS for count in (1, 2, 3) if (name, count) != ("triton", 2)],
)
def test_the_smallest_server_passes_its_own_checks(
    backend: str, requests: int, ring: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sglang_dflash.serving.start.plan.processors_of", lambda _: 132)
    device = torch.device(DEVICE)
    ops = TritonOps() if backend == "triton" else TorchOps()
    with device:
        model = DraftModel(DraftConfig.from_dict(raw_config(**MIXED)), ops=ops).freeze()
    options = Options(verify_block=BLOCK, draft_kv_tokens=ring).resolve(model.config)
    # A quarter of the pool holds a block; the context is twice as long.
    pool, context = 4 * BLOCK, 2 * BLOCK
    options.check_room(pool)
    replace(options, context=context).check_room(pool)
    plan = Plan.of_draft(model, options, backend, BACKENDS[backend], requests)
    # SGLang reserves two blocks beyond the context.
    columns = context + 2 * BLOCK + 1
    groups = plan.groups(pool, pool + 1, requests, columns, carried=requests)
    plan.check(groups, requests)
    if backend != "torch":
        return
    # Torch is what the others are compared with; its steps are what can be recorded on the host.
    for group in groups:
        check_attention(model, options.draft_block, group, requests)
    drafter = Drafter(model, random_head(model), groups, options)
    slots = torch.zeros(requests + 1, columns, dtype=torch.int32, device=device)
    sizes = tuple(range(1, requests + 1))
    with torch.no_grad():
        recorded = GraphedDrafter(drafter, OpRecorder(), slots, sizes, ())
        drafter.counters.clear()
        check_recording(drafter, recorded, slots, sizes)
    assert not recorded.eager and not slots.any()
