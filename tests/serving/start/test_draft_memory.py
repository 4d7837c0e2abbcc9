"""The drafter's memory beside weights and K/V: what is reserved is what is allocated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.configs import qwen3_next
from sglang.srt.configs.qwen3_next import Qwen3NextConfig
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from torch._subclasses.fake_tensor import FakeTensorMode

from sglang_dflash.checkpoint.draft_config import DraftConfig
from sglang_dflash.drafting.attention.backend import Backend
from sglang_dflash.drafting.attention.capabilities import Capabilities, split_bytes
from sglang_dflash.drafting.attention.paged import PagedAttention
from sglang_dflash.drafting.drafter import Drafter
from sglang_dflash.drafting.graphs import GraphedDrafter
from sglang_dflash.drafting.kv.ring import RingKVCache
from sglang_dflash.drafting.options import Options
from sglang_dflash.drafting.width import WidthPolicy
from sglang_dflash.memory.draft_memory import (
    DraftMemory,
    NarrowForwards,
    draft_memory,
    narrow_width_bytes,
)
from sglang_dflash.memory.sizes import BYTES_PER_ENTRY, BYTES_PER_TARGET_SLOT
from sglang_dflash.serving.gpu.backends import ATTENTION
from sglang_dflash.serving.hybrid.replay_pool import ReplayPool
from sglang_dflash.serving.hybrid.rollback import Replay
from sglang_dflash.serving.kv_transfer.host_tier import HostTier
from sglang_dflash.serving.start import memory
from sglang_dflash.serving.start.memory import draft_reservation, size_state_pool
from sglang_dflash.serving.start.plan import Plan
from sglang_dflash.tools.gpu_check.drafters import random_head, random_model
from tests.conftest import raw_config
from tests.drafting.test_paged_attention import plain_kernel
from tests.recording import OpRecorder

# Two groups of layers, the first and the last of them in one.
SLIDING = {
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "sliding_window": 200,
}
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
RUNNING, POSITIONS = 5, 3000


@pytest.fixture(autouse=True)
def _a_gpus_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sglang_dflash.serving.start.plan.processors_of", lambda _: 132)


BACKENDS = {
    "torch": ATTENTION["torch"],
    "triton": replace(
        ATTENTION["triton"], capabilities=Capabilities(capturable=True, workspace=split_bytes)
    ),
    "pages": Backend(
        Capabilities(capturable=True, scratch=True),
        lambda sizes: PagedAttention(
            sizes.layers, sizes.load.draft_block, sizes.scratch, plain_kernel, sizes.holes
        ),
    ),
}


def plan_for(
    backend: str,
    window: int | None,
    config: DraftConfig,
    device: torch.device = CPU,
    blocks: int = 1,
) -> Plan:
    """`blocks`: of the draft's, what a step verifies."""
    dtype = torch.float32 if device == CPU else torch.bfloat16
    model = random_model(config, device, dtype)
    asked = Options(window=window, looks_up=True, verify_block=blocks * config.block_size)
    options = asked.resolve(config)
    return Plan.of_draft(model, options, backend, BACKENDS[backend], RUNNING)


def needs(plan: Plan, recorded: int = 0, widths: Sequence[int] = ()) -> DraftMemory:
    """Return the memory on a CPU, where narrow widths of the target keep nothing."""
    return draft_memory(
        plan.model.config, plan.step_sizes(POSITIONS, recorded, NarrowForwards(widths))
    )


REPLAYS: Any = SimpleNamespace(name="replay")


def narrow(plan: Plan, widths: Sequence[int]) -> WidthPolicy:
    """Return a policy of these widths and the whole block."""
    policy = WidthPolicy(plan.options.verify_block)
    policy.widths = (*widths, *policy.widths)
    return policy


def drafter_of(plan: Plan, slots: int) -> Drafter:
    groups = plan.groups(slots - 1, slots, RUNNING, POSITIONS, carried=RUNNING)
    return Drafter(plan.model, random_head(plan.model), groups, plan.options)


@pytest.mark.parametrize("window", [None, 300])
def test_attention_with_scratch_entries_passes_the_start_up_check(window: int | None) -> None:
    """FA3 and FA4 have such entries."""
    plan = plan_for("pages", window, DraftConfig.from_dict(raw_config(**SLIDING)))
    groups = plan.groups(8999, 9000, RUNNING, POSITIONS, carried=RUNNING)
    plan.check(groups, RUNNING)
    assert not any(group.cache.kv.any() for group in groups)


@pytest.mark.parametrize("hierarchical", [False, True], ids=["device", "hierarchical"])
@pytest.mark.parametrize(("window", "blocks"), [(None, 1), (300, 1), (300, 3)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_kept_is_what_was_reserved(
    backend: str, blocks: int, window: int | None, hierarchical: bool
) -> None:
    config = DraftConfig.from_dict(raw_config(**SLIDING))
    plan = replace(plan_for(backend, window, config, CPU, blocks), hierarchical=hierarchical)
    tags = (BYTES_PER_ENTRY + 2 * BYTES_PER_TARGET_SLOT) * hierarchical
    needed = needs(plan, recorded=4)
    slots = 9000
    drafter = drafter_of(plan, slots)
    scratch = workspaces = columns = 0
    for group in drafter.groups:
        cache, attention = group.cache, group.attention
        scratch += cache.kv[cache.num_entries :].nbytes
        if backend == "triton":
            kept = (part for part in vars(attention).values() if isinstance(part, torch.Tensor))
            workspaces += sum(tensor.nbytes for tensor in kept)
        columns += group.reach.tokens_read(POSITIONS)
        kv, entries = plan.draft_kv(RUNNING)[drafter.groups.index(group)], cache.num_entries
        assert cache.kv[0].nbytes + tags == kv.token_bytes
        if group.reach.is_bounded:
            assert isinstance(cache, RingKVCache) and entries == kv.ring
            of_entries = cache.tags.owner.nbytes + cache.tags.in_use.nbytes
            assert of_entries == BYTES_PER_ENTRY * (entries + 1)
            assert cache.tags.entry_of.nbytes == BYTES_PER_TARGET_SLOT * slots
    if hierarchical:
        kept = vars(HostTier(drafter.groups, RUNNING)).values()
        there = sum(tensor.nbytes for tensor in kept if isinstance(tensor, torch.Tensor))
        # And a number, with its copy on the host.
        assert there == BYTES_PER_TARGET_SLOT * slots + 2 * 8
    assert needed.scratch_kv == scratch if not hierarchical else needed.scratch_kv > scratch
    if backend == "triton":
        assert needed.attention_workspace == workspaces > 0
    assert columns == 200 + (POSITIONS if window is None else window)
    holes = sum(
        group.reach.tokens_read(POSITIONS) for group in drafter.groups if group.cache.has_holes
    )
    table = 12 * (columns - holes) + 48 * holes if backend == "pages" else 4 * columns
    assert needed.context_tables == RUNNING * table
    slots_of = torch.zeros(RUNNING + 1, POSITIONS, dtype=torch.int32)
    if backend == "torch":
        graphed = GraphedDrafter(drafter, OpRecorder(), slots_of, (1, 4), (64,))
        assert needed.graph_buffers == graphed.buffer_bytes
    assert needs(plan).graph_buffers == 0


@pytest.mark.parametrize(("widths", "device"), [((1, 4), CUDA), ((), CUDA), ((1, 4), CPU)])
def test_narrower_widths_are_part_of_the_plan_on_a_gpu(
    widths: tuple[int, ...], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "table_positions", lambda context: context)
    monkeypatch.setattr(memory, "target_has_graphs", lambda _device: True)
    monkeypatch.setattr(memory, "captured_sizes", lambda most: (1, most))
    monkeypatch.setattr(memory, "attention_backends", lambda: ("fa3", "fa3"))
    monkeypatch.setattr(memory, "get_parallel", lambda: SimpleNamespace(attn_tp_size=1))
    with FakeTensorMode():
        plan = plan_for("triton", 300, DraftConfig.from_dict(raw_config()), device)
        heads: Any = lambda _ranks: 4  # noqa: E731
        model_config: Any = SimpleNamespace(
            context_len=2048, head_dim=16, get_num_attention_heads=heads
        )
        of_server = replace(plan, policy=narrow(plan, widths))
        needed = draft_reservation(of_server, model_config).needed
    forwards = NarrowForwards(widths, {"fa3"}, query_width=64, captured=(1, RUNNING))
    expected = narrow_width_bytes(
        forwards,
        requests=RUNNING,
        positions=2048,
        hidden_bytes=2 * plan.model.config.target_hidden_width,
    )
    expected *= device == CUDA
    assert needed.narrow_widths == expected
    assert (needed.waiting_hidden > 0) == bool(widths)


def test_a_server_shows_and_hands_on_what_it_needs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(memory, "table_positions", lambda context: context + 20)
    monkeypatch.setattr(memory, "captured_sizes", lambda most: (1, most - 1))
    model_config: Any = SimpleNamespace(context_len=2048)
    plan = plan_for("torch", 300, DraftConfig.from_dict(raw_config()))
    with caplog.at_level("INFO"):
        told = draft_reservation(replace(plan, recorder=OpRecorder, rollback=REPLAYS), model_config)
    assert told.needed.total == sum(told.needed) and told.recorded
    assert told.needed.after_graphs(told.recorded) == told.needed.projection > 0
    assert told.draft_kv(told.carried) == ((3 * 2 * 2 * 16 * 4, (RUNNING + 1) * (300 + 4)),)
    (line,) = caplog.messages
    assert line.startswith(
        "sglang-dflash: reserved beside draft K/V, before the KV pools are sized: "
    )
    # 300 tokens and the block of 5 requests, not a chunk of 64 MiB.
    assert "attention workspace 1.0, graph buffers 0.0, logits" in line
    # Eager steps allocate when they run.
    eager = draft_reservation(plan, model_config)
    later = eager.needed.after_graphs(eager.recorded)
    needed = eager.needed
    assert later == needed.projection + needed.logits + needed.activations
    assert eager.needed.waiting_hidden == eager.needed.graph_buffers == 0


def test_prompts_and_what_waits_are_projected_beside_the_recorded_steps() -> None:
    """A recorded step has memory of its own."""
    plan = plan_for("torch", None, DraftConfig.from_dict(raw_config()))
    needed = needs(plan, recorded=RUNNING, widths=(1,))
    assert needed.after_graphs(recorded=True) == needed.waiting_hidden + needed.projection


HYBRID = Qwen3NextConfig(
    num_hidden_layers=4, full_attention_interval=4, linear_conv_kernel_dim=4,
    linear_key_head_dim=8, linear_value_head_dim=16,
    linear_num_key_heads=2, linear_num_value_heads=6,
)  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_replay_keeps_is_reserved_once(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state pool and the drafter together reserve what a real pool and recording take."""
    monkeypatch.setattr(memory, "table_positions", lambda context: context)
    monkeypatch.setattr(qwen3_next, "linear_attn_tp_size", lambda: 1)
    plan = plan_for("torch", None, DraftConfig.from_dict(raw_config()))
    block, params = plan.options.verify_block, HYBRID.mamba2_cache_params
    spec = SimpleNamespace(speculative_num_draft_tokens=block)
    monkeypatch.setattr(memory, "get_spec", lambda: spec)
    schedule = SimpleNamespace(max_running_requests=RUNNING)
    monkeypatch.setattr(memory, "get_schedule", lambda: schedule)
    model: Any = SimpleNamespace(context_len=2048, dtype=dtype)
    snapshots, replays = (
        draft_reservation(replace(plan, rollback=of), model) for of in (None, REPLAYS)
    )
    configurator = SimpleNamespace(
        is_draft_worker=False, spec_aux_config=SimpleNamespace(reservation=replays),
        model_config=model, spec_algorithm=SpeculativeAlgorithm.DFLASH, mambaish_config=HYBRID,
        attn_dp_size=1,
    )  # fmt: skip
    monkeypatch.setattr(memory, "_splits_by_default", lambda _: False)
    by_pool = 2**30 * (1 - size_state_pool(lambda _, rest_gb: rest_gb, configurator, 1.0))

    pool = ReplayPool(
        size=9, spec_state_size=RUNNING, cache_params=params, mamba_layer_ids=params.layers,
        device="cpu", speculative_num_draft_tokens=block,
    )  # fmt: skip
    requests: Any = SimpleNamespace(
        size=RUNNING, mamba_pool=pool, mamba2_layer_index=params.layers.index
    )
    gate, slots = torch.zeros(RUNNING * block, 6, dtype=dtype), torch.arange(RUNNING)
    for index in params.layers:
        layer = SimpleNamespace(layer_id=index)
        pool.recording.record(requests, layer, gate, gate, slots, block)
    kept = Replay(SimpleNamespace(req_to_token_pool=requests)).scratch_bytes
    # A single number stands for the snapshots.
    kept -= pool.mamba_cache.intermediate_ssm.untyped_storage().nbytes()
    assert by_pool + replays.needed.total - snapshots.needed.total == kept
