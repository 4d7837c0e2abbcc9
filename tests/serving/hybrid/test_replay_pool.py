"""Replay's changes to SGLang: no snapshots are sized, allocated or written; verify is recorded."""

from __future__ import annotations

import inspect
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.kernels.ops.attention.linear import fused_sigmoid_gating_recurrent as recurrent
from sglang.srt.layers.attention.linear.kernels import gdn_triton
from sglang.srt.layers.attention.linear.kernels.gdn_triton import TritonGDNKernel
from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool, MambaPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from torch.utils._python_dispatch import TorchDispatchMode

from sglang_dflash.drafting.recurrent.replay import fold_, move_windows_
from sglang_dflash.drafting.self_check import SelfCheckFailed
from sglang_dflash.serving.draft_weights import updates
from sglang_dflash.serving.hybrid import replay_pool
from sglang_dflash.serving.hybrid.rollback import Replay, Rollback
from sglang_dflash.serving.start import memory
from tests.patches.originals import original
from tests.serving.fake_cuda import FakeCuda
from tests.serving.recurrent_target import gdn_layer, recorded_runner

DFLASH = SpeculativeAlgorithm.DFLASH


def test_sizing_reserves_no_snapshots(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang reserves them for a speculative algorithm; replay's own bytes are taken off."""
    monkeypatch.setattr(memory, "_replay_bytes", lambda _: 2**29)
    monkeypatch.setattr(memory, "_splits_by_default", lambda _: False)
    found: list[tuple[Any, float]] = []

    def handle(of: Any, rest_gb: float) -> float:
        found.append((of.spec_algorithm, rest_gb))
        return rest_gb

    of = SimpleNamespace(spec_algorithm=DFLASH)
    memory.size_state_pool(handle, of, 4.0)
    assert of.spec_algorithm is DFLASH
    assert found == [(SpeculativeAlgorithm.NONE, 3.5)]
    with pytest.raises(ZeroDivisionError):
        memory.size_state_pool(lambda *_: 1 / 0, of, 4.0)
    assert of.spec_algorithm is DFLASH


def test_the_pool_has_no_snapshots() -> None:
    def build(_configurator: Any, **_: Any) -> type:
        return HybridReqToTokenPool.mamba_pool_cls

    assert memory.build_state_pool(build, None) is replay_pool.ReplayPool
    with pytest.raises(ZeroDivisionError):
        memory.build_state_pool(lambda *_, **__: 1 / 0, None)
    assert HybridReqToTokenPool.mamba_pool_cls is MambaPool


class FakePool(replay_pool.ReplayPool):
    """Two layers, four state slots, a convolution of width 4 over 3 channels."""

    def __init__(self) -> None:
        self.mamba_cache = SimpleNamespace(
            conv=[torch.randn(2, 4, 3, 3)], intermediate_conv_window=[torch.zeros(2, 6, 2, 3, 3)]
        )
        self.recording = replay_pool.Recording()


def verify(is_verify: bool, state_pool: Any, tokens: int = 2, size: int = 5) -> None:
    """Run a forward of four tokens by two layers, with a request pool of that size."""
    requests = SimpleNamespace(
        size=size, mamba_pool=state_pool, mamba2_layer_index=lambda layer_id: layer_id - 10
    )
    slots = SimpleNamespace(mamba_cache_indices=torch.tensor([3, 1, 2, 0][: 4 // tokens]))
    forward = SimpleNamespace(
        forward_mode=ForwardMode.TARGET_VERIFY if is_verify else ForwardMode.DECODE,
        spec_info=SimpleNamespace(draft_token_num=tokens),
    )
    backend = SimpleNamespace(req_to_token_pool=requests, forward_metadata=slots)
    a = torch.arange(8.0).view(4, 2)
    calls: list[tuple[Any, ...]] = []
    for layer in (SimpleNamespace(layer_id=10), SimpleNamespace(layer_id=11)):
        replay_pool.record_verify(
            lambda *args, **_: calls.append(args), backend, layer, forward, None, a, -a
        )
    assert len(calls) == 2


def test_only_verify_forwards_are_recorded() -> None:
    """They are recorded only for a target that keeps no snapshots."""
    verify(True, SimpleNamespace())
    pool = FakePool()
    verify(False, pool)
    assert not pool.recording.layers
    verify(True, pool)
    recording = pool.recording
    assert [recording.layers[i].layer_id for i in (0, 1)] == [10, 11]
    # Two requests of two tokens, two value heads; a in the first half, b in the second.
    assert recording.gates.shape == (2, 2, 6, 2, 2)
    assert recording.gates[0, 0, :2].tolist() == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
    assert recording.gates[1].equal(-recording.gates[0])
    assert recording.windows[:, :2].equal(pool.mamba_cache.conv[0][:, [3, 1]])


def test_a_step_may_record_less_than_a_block() -> None:
    """The block has two tokens here; a narrow step comes first, and between wide ones."""
    pool = FakePool()
    verify(True, pool, tokens=1)
    narrow = pool.recording.gates[0, 0, :4, 0].tolist()
    assert narrow == [[0, 1], [2, 3], [4, 5], [6, 7]]
    verify(True, pool)
    assert pool.recording.gates[0, 0, :2].tolist() == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]


def test_a_batch_padded_beyond_the_pool_is_recorded_as_far_as_the_pool_has_rows() -> None:
    """SGLang pads the batches of its warm-ups to a multiple of the TP size."""
    pool = FakePool()
    verify(True, pool, tokens=1, size=2)
    assert pool.recording.gates.shape[2] == 3
    assert pool.recording.gates[0, 1, :, 0].tolist() == [[0, 1], [2, 3], [4, 5]]
    assert pool.recording.windows.equal(pool.mamba_cache.conv[0][:, [3, 1, 2]])


def test_a_layer_is_recorded_by_one_operation() -> None:
    """Views are not counted. The windows of all layers are copied by one, with the first layer,
    into the memory that is kept: in a captured graph a temporary would be memory that nothing
    reserves."""
    ran: Counter[str] = Counter()
    pool = FakePool()
    verify(True, pool)
    kept = pool.recording.windows.untyped_storage().data_ptr()

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            result = func(*args, **(kwargs or {}))
            if not func.is_view:
                ran[func.__name__] += 1
                large = isinstance(result, torch.Tensor) and result.ndim == 4
                assert not large or result.untyped_storage().data_ptr() == kept
            return result

    with Watch():
        verify(True, pool)
    copied = {name: n for name, n in ran.items() if "copy" in name or "index" in name}
    assert copied == {"_foreach_copy_.default": 2, "index_select.out": 1}


def test_padding_is_recorded_too() -> None:
    """SGLang gives it the slot -1."""
    pool = FakePool()
    slots, gate = torch.tensor([3, -1], dtype=torch.int32), torch.zeros(4, 2)
    requests: Any = SimpleNamespace(
        size=5, mamba_pool=pool, mamba2_layer_index=lambda layer_id: layer_id
    )
    pool.recording.record(requests, SimpleNamespace(layer_id=0), gate, gate, slots, 2)
    assert pool.recording.windows[:, 0].equal(pool.mamba_cache.conv[0][:, 3])


def test_a_replay_that_differs_from_torch_is_found_at_start() -> None:
    runner = recorded_runner(gdn_layer(1, 4), depth=2, rows=3, block=4)
    Replay(runner).check()
    for ops in (
        (lambda *_: None, move_windows_),
        (fold_, lambda *_: None),
    ):
        with pytest.raises(SelfCheckFailed, match="replay"):
            Replay(runner, *ops).check()


class Launched:
    """SGLang's kernel, not launched: what it would be given."""

    def __getitem__(self, grid: Any) -> Any:
        def launch(**given: Any) -> None:
            self.grid, self.given = grid, given

        return launch


@pytest.mark.parametrize("snapshots", [True, False], ids=["snapshots", "replay"])
def test_verify_has_the_launch_shape_of_a_verify_with_snapshots(
    snapshots: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiles are of 4 value rows on sm_90, not of 32. Without snapshots no row of them is named."""
    kernel = Launched()
    monkeypatch.setattr(recurrent, "fused_sigmoid_gating_delta_rule_update_kernel", kernel)
    monkeypatch.setattr(recurrent, "_is_sm90", True)
    update = "fused_sigmoid_gating_delta_rule_update"
    monkeypatch.setattr(gdn_triton, update, original(f"{recurrent.__name__}.{update}"))
    requests, block, heads, dim = 3, 4, 2, 128
    of_triton = TritonGDNKernel()
    dispatcher: Any = SimpleNamespace(_get_target_verify_kernel=lambda _: of_triton)

    def target_verify(_dispatcher: Any, **given: Any) -> None:
        of_triton.target_verify(**given)

    with FakeCuda(), torch.device("cuda"):
        x = torch.zeros(1, requests * block, heads, dim)
        states = torch.zeros(requests, heads, dim, dim)
        buffer = (
            torch.zeros(requests, block, heads, dim, dim)
            if snapshots
            else states.new_zeros(()).expand(requests, block, heads, dim, dim)
        )
        rows = torch.arange(requests, dtype=torch.int32)
        for _ in range(2):
            replay_pool.verify_without_snapshots(
                target_verify, dispatcher, q=x, k=x, v=x, A_log=x[0, 0, :, 0], a=x[0, :, :, 0],
                dt_bias=x[0, 0, :, 0], b=x[0, :, :, 0], ssm_states=states, cache_indices=rows,
                query_start_loc=torch.zeros(requests + 1), intermediate_states_buffer=buffer,
                intermediate_state_indices=rows, cache_steps=block, retrieve_parent_token=None,
            )  # fmt: skip
        assert kernel.given["BV"] == 4 and kernel.grid == (dim // 4, requests, heads)
        assert kernel.given["intermediate_states_buffer"] is buffer
        named = kernel.given["intermediate_state_indices"]
        assert (named is rows) == snapshots
        assert (named is getattr(dispatcher, "no_rows", None)) == (not snapshots)


def test_a_buffer_without_memory_is_not_passed_on() -> None:
    """Other kernels than that one do not get it."""
    passed: list[Any] = []

    def target_verify(_dispatcher: Any, **kwargs: Any) -> None:
        passed.append(kwargs["intermediate_states_buffer"])

    real, other = torch.zeros(2, 3), SimpleNamespace(_get_target_verify_kernel=lambda _: object())
    for buffer in (real, torch.zeros(()).expand(2, 3), None):
        replay_pool.verify_without_snapshots(
            target_verify, other, intermediate_states_buffer=buffer
        )
    assert passed[0] is real and passed[1:] == [None, None]


def layer_of(value: float) -> Any:
    """The weights of one of SGLang's GDN layers."""
    layer = gdn_layer(1, 4)
    for name in ("conv_weights", "A_log", "dt_bias"):
        getattr(layer, name).fill_(value)
    layer.bias = torch.full((2,), value)
    return layer


def test_new_weights_are_stacked_again() -> None:
    """The memory stays the same, for a captured graph reads it; nothing else stacks them."""
    recorded = {i: layer_of(float(i)) for i in range(3)}
    pool = SimpleNamespace(recording=SimpleNamespace(layers=recorded))
    runner = SimpleNamespace(req_to_token_pool=SimpleNamespace(mamba_pool=pool))
    replay = Replay(runner)
    layers = replay.layers()
    stacked = (layers.conv_weight, layers.conv_bias, layers.a_log, layers.dt_bias)
    assert [t[1].unique().item() for t in stacked if t is not None] == [1.0] * 4
    # SGLang loads into the parameter, or replaces it.
    recorded[1].conv_weights.fill_(5)
    recorded[1].A_log = torch.full((2,), 5.0)
    recorded[1].dt_bias.fill_(5)
    recorded[1].bias.fill_(5)
    assert layers.conv_weight[1].unique().item() == 1.0
    worker = SimpleNamespace(dflash=SimpleNamespace(rollback=replay), draft_model=None)
    updates.with_draft([], SimpleNamespace(draft_worker=worker, tp_cpu_group=None), "target")
    assert replay.layers() is layers
    assert [t[1].unique().item() for t in stacked if t is not None] == [5.0] * 4


def test_sglangs_ring_of_inputs_counts_as_scratch() -> None:
    """--enable-linear-replayssm-spec keeps it in place of snapshots, which are None then."""
    window = torch.zeros(1, 2, 4, 3, 3)
    ring = {"replayssm_d": torch.zeros(1, 2, 5), "replayssm_k": None}
    cache = SimpleNamespace(intermediate_ssm=None, intermediate_conv_window=[window], **ring)
    pool = SimpleNamespace(mamba_pool=SimpleNamespace(mamba_cache=cache))
    runner = SimpleNamespace(req_to_token_pool=pool)
    assert Rollback(runner).scratch_bytes == window.nbytes + 40


def test_every_update_of_weights_chooses_its_runners() -> None:
    """It chooses before it loads them: that call tells replay."""
    from sglang.srt.managers.scheduler_components.weight_updater import (
        SchedulerWeightUpdaterManager as Manager,
    )

    updates = [name for name in vars(Manager) if name.startswith("update_weights_")]
    assert len(updates) == 4
    for name in (*updates, "begin_weight_update", "end_weight_update"):
        assert "_select_runners(" in inspect.getsource(getattr(Manager, name)), name
