"""Replay beside SGLang's own kernels of recurrent layers."""

from __future__ import annotations

import inspect

import pytest
import torch
import triton
import triton.language as tl
from dflash_kernels import gated_delta_fold

from sglang_dflash.drafting.recurrent import gated_delta
from tests.kernels.support import DEVICE, needs_interpreter
from tests.patches.originals import original

# A GPU may be lent without it.
pytest.importorskip("sglang")

from sglang.kernels.ops.attention.linear import (
    fused_sigmoid_gating_recurrent as recurrent,
)
from sglang.kernels.ops.mamba import causal_conv1d_triton


def conv_kernel(p_out, p_window, p_inputs, p_weight, p_bias, C, T, W: tl.constexpr,
                HAS_BIAS: tl.constexpr):  # fmt: skip
    """The fold's convolution by itself: `[C, T]` of a window `[C, W - 1]` and inputs `[T, C]`."""
    o_c = tl.arange(0, 64)
    for i_t in range(T):
        b_out = gated_delta_fold._conv_silu(p_window + o_c * (W - 1), p_inputs + o_c,
                                            p_weight + o_c * W, p_bias + o_c, o_c < C, i_t,
                                            1, C, W, HAS_BIAS)  # fmt: skip
        tl.store(p_out + o_c * T + i_t, b_out, mask=o_c < C)


@pytest.mark.parametrize("bias", [False, True], ids=["no-bias", "bias"])
@pytest.mark.parametrize("width", [2, 4])
def test_the_convolution_rounds_as_sglangs_kernel(
    width: int, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decode's and verify's are equal to the bit: the state after a block is the one that decoding
    its tokens leaves. The twin may differ in the last bit of silu."""
    # Only what is decorated now runs in the interpreter: SGLang's module was imported without it.
    name = "_causal_conv1d_update_kernel"
    again = triton.jit(getattr(causal_conv1d_triton, name).fn)
    monkeypatch.setattr(causal_conv1d_triton, name, again)
    channels, block = 48, 5
    x, history = torch.randn(1, channels, block), torch.randn(1, channels, width - 1)
    x, history, weight = (
        t.bfloat16().to(DEVICE) for t in (x, history, torch.randn(channels, width))
    )
    shift = torch.randn(channels, device=DEVICE).bfloat16() if bias else None
    steps = torch.empty(1, block, channels, width - 1, dtype=x.dtype, device=DEVICE)
    slot = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    theirs = original(f"{causal_conv1d_triton.__name__}.causal_conv1d_update")(
        x, history.clone(), weight, shift, "silu", conv_state_indices=slot,
        intermediate_conv_window=steps, intermediate_state_indices=slot,
    )[0]  # fmt: skip
    got = torch.empty(channels, block, dtype=x.dtype, device=DEVICE)
    tokens = x[0].T.contiguous()
    added = shift if bias else weight
    triton.jit(conv_kernel)[(1,)](
        got, history, tokens, weight, added, channels, block, W=width, HAS_BIAS=bias
    )
    assert torch.equal(got, theirs)
    twin, windows = gated_delta.causal_conv(x.transpose(1, 2), history, weight, shift, "silu")
    assert (twin[0].T.to(x.dtype) != theirs).float().mean() < 0.01
    assert torch.equal(windows[:, 1:], steps)


@needs_interpreter
def test_sglangs_verify_kernel_writes_no_snapshot_without_a_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Replay passes it a buffer of one number, and rows of -1."""
    name, dim, block = "fused_sigmoid_gating_delta_rule_update_kernel", 16, 2
    again = triton.jit(inspect.unwrap(getattr(recurrent, name).fn))
    monkeypatch.setattr(recurrent, name, again)
    q, k, v = torch.randn(3, 1, block, 1, dim)
    a, b, states = torch.randn(block, 1), torch.randn(block, 1), torch.randn(1, 1, dim, dim)
    one, row = torch.zeros(()), torch.zeros(1, dtype=torch.int32)

    def verified(buffer: torch.Tensor | None, rows: torch.Tensor) -> torch.Tensor:
        return original(f"{recurrent.__name__}.fused_sigmoid_gating_delta_rule_update")(
            A_log=torch.zeros(1), a=a, dt_bias=torch.zeros(1), softplus_beta=1.0,
            softplus_threshold=20.0, q=q, k=k, v=v, b=b, initial_state_source=states,
            initial_state_indices=row, use_qk_l2norm_in_kernel=True, disable_state_update=True,
            cu_seqlens=torch.tensor([0, block]), intermediate_states_buffer=buffer,
            intermediate_state_indices=rows, cache_steps=block,
        )  # fmt: skip

    before, without = states.clone(), verified(None, row)
    assert torch.equal(verified(one.expand(1, block, 1, dim, dim), row - 1), without)
    assert one == 0 and torch.equal(states, before)
    kept = torch.zeros(1, block, 1, dim, dim)
    assert torch.equal(verified(kept, row), without) and kept.all()
