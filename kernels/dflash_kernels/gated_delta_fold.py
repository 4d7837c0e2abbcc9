"""Fold the accepted tokens of a verified block into Gated DeltaNet states: one launch per layer."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglang_dflash.config import ConfigError
from sglang_dflash.core.gated_delta import NORM_EPS, RecurrentLayer

# Value rows of a state tile: 32 x 128 float32 are 16 KiB of registers per program.
BLOCK_V = 32


@triton.jit
def _convolved(p_window, p_inputs, p_weight, p_bias, o_c, b_mask, i_t, C, W: tl.constexpr, HAS_BIAS: tl.constexpr):
    """silu(conv) of the channels `o_c` at block position `i_t`, float32, rounded as the verify forward rounds it."""
    b_sum = tl.zeros(o_c.shape, dtype=tl.float32)
    for i_w in tl.static_range(W):
        i_s = i_t - (W - 1) + i_w
        b_old = tl.load(p_window + o_c * (W - 1) + (W - 1 + i_s), mask=b_mask & (i_s < 0), other=0.0).to(tl.float32)
        b_new = tl.load(p_inputs + i_s * C + o_c, mask=b_mask & (i_s >= 0), other=0.0).to(tl.float32)
        b_sum += (b_old + b_new) * tl.load(p_weight + o_c * W + i_w, mask=b_mask, other=0.0).to(tl.float32)
    if HAS_BIAS:
        b_sum += tl.load(p_bias + o_c, mask=b_mask, other=0.0).to(tl.float32)
    return (b_sum / (1.0 + tl.exp(-b_sum))).to(p_inputs.dtype.element_ty).to(tl.float32)


@triton.jit
def _fold_kernel(
    p_window, p_inputs, p_a, p_b, p_state, p_out, p_lengths, p_weight, p_bias, p_a_log, p_dt_bias,
    s_window, s_inputs, s_gate_n, s_gate_t, s_state, EPS,
    C, H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, W: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    i_n, i_h, i_v = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    o_k, o_v = tl.arange(0, BLOCK_K), i_v * BLOCK_V + tl.arange(0, BLOCK_V)
    m_k, m_v = o_k < K, o_v < V
    c_k, c_v = H * K + i_h // (HV // H) * K + o_k, 2 * H * K + i_h * V + o_v
    p_window, p_inputs = p_window + i_n * s_window, p_inputs + i_n * s_inputs
    o_state = i_h * V * K + o_v[:, None] * K + o_k[None, :]
    m_state = m_v[:, None] & m_k[None, :]
    b_state = tl.load(p_state + i_n * s_state + o_state, mask=m_state, other=0.0).to(tl.float32)
    b_rate = -tl.exp(tl.load(p_a_log + i_h).to(tl.float32))
    b_shift = tl.load(p_dt_bias + i_h).to(tl.float32)
    for i_t in range(tl.load(p_lengths + i_n)):
        b_k = _convolved(p_window, p_inputs, p_weight, p_bias, c_k, m_k, i_t, C, W, HAS_BIAS)
        b_v = _convolved(p_window, p_inputs, p_weight, p_bias, c_v, m_v, i_t, C, W, HAS_BIAS)
        b_k = b_k / tl.sqrt(tl.sum(b_k * b_k) + EPS)
        b_gate = tl.load(p_a + i_n * s_gate_n + i_t * s_gate_t + i_h).to(tl.float32) + b_shift
        # softplus; past 20 it is its argument.
        b_decay = tl.exp(b_rate * tl.where(b_gate > 20.0, b_gate, tl.log(1.0 + tl.exp(tl.minimum(b_gate, 20.0)))))
        b_beta = 1.0 / (1.0 + tl.exp(-tl.load(p_b + i_n * s_gate_n + i_t * s_gate_t + i_h).to(tl.float32)))
        b_state *= b_decay
        b_write = b_beta * (b_v - tl.sum(b_state * b_k[None, :], axis=1))
        b_state += b_write[:, None] * b_k[None, :]
    tl.store(p_out + (i_n * HV * V * K) + o_state, b_state, mask=m_state)


def fold(layer: RecurrentLayer, window: Tensor, inputs: Tensor, a: Tensor, b: Tensor, state: Tensor, lengths: Tensor) -> Tensor:
    """As `core.gated_delta.fold`: window `[N, C, W - 1]`, inputs `[N, B, C]`, a and b `[N, B, HV]`, state `[N, HV, V, K]`, lengths int64
    `[N]`; returns float32 `[N, HV, V, K]`.

    Raises:
        ConfigError: the layer's activation is not silu.
    """
    if layer.activation not in ("silu", "swish"):
        raise ConfigError(f"activation: {layer.activation!r}; the fold kernel computes silu")
    inputs, window, state = inputs.contiguous(), window.contiguous(), state.contiguous()
    assert a.stride() == b.stride() and a.stride(-1) == 1
    out = torch.empty(state.shape, dtype=torch.float32, device=state.device)
    grid = (len(lengths), layer.value_heads, triton.cdiv(layer.value_dim, BLOCK_V))
    bias = layer.conv_bias if layer.conv_bias is not None else layer.conv_weight
    _fold_kernel[grid](
        window, inputs, a, b, state, out, lengths, layer.conv_weight.contiguous(), bias, layer.a_log, layer.dt_bias,
        window.stride(0), inputs.stride(0), a.stride(0), a.stride(1), state.stride(0), NORM_EPS,
        C=inputs.shape[2], H=layer.key_heads, HV=layer.value_heads, K=layer.key_dim, V=layer.value_dim, W=layer.conv_weight.shape[1],
        BLOCK_K=triton.next_power_of_2(layer.key_dim), BLOCK_V=BLOCK_V, HAS_BIAS=layer.conv_bias is not None,
    )  # fmt: skip
    return out
