"""Fold the accepted tokens of a verified block into Gated DeltaNet states: one launch for all layers and requests."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from sglang_dflash.checkpoint.errors import ConfigError
from sglang_dflash.core.recurrent.gated_delta import NORM_EPS
from sglang_dflash.core.recurrent.replay import RecurrentLayers, VerifyInputs

# Value rows of a state tile: 32 x 128 float32 are 16 KiB of registers per program.
BLOCK_V = 32


@triton.jit
def _convolved(p_window, p_inputs, p_weight, p_bias, o_c, b_mask, i_t, s_window_c, s_window_w, s_inputs_t, s_inputs_c,
               W: tl.constexpr, HAS_BIAS: tl.constexpr):  # fmt: skip
    """silu(conv) of the channels `o_c` at block position `i_t`, float32, rounded as the verify forward rounds it."""
    b_sum = tl.zeros(o_c.shape, dtype=tl.float32)
    for i_w in tl.static_range(W):
        i_s = i_t - (W - 1) + i_w
        p_old = p_window + o_c * s_window_c + (W - 1 + i_s) * s_window_w
        b_old = tl.load(p_old, mask=b_mask & (i_s < 0), other=0.0).to(tl.float32)
        b_new = tl.load(
            p_inputs + i_s * s_inputs_t + o_c * s_inputs_c, mask=b_mask & (i_s >= 0), other=0.0
        ).to(tl.float32)
        b_sum += (b_old + b_new) * tl.load(p_weight + o_c * W + i_w, mask=b_mask, other=0.0).to(
            tl.float32
        )
    if HAS_BIAS:
        b_sum += tl.load(p_bias + o_c, mask=b_mask, other=0.0).to(tl.float32)
    return (b_sum / (1.0 + tl.exp(-b_sum))).to(p_inputs.dtype.element_ty).to(tl.float32)


@triton.jit
def _fold_kernel(
    p_states, p_window, p_inputs, p_a, p_b, p_rows, p_source, p_target, p_lengths, p_weight, p_bias, p_a_log, p_dt_bias,
    s_states_l, s_states_s, s_window_l, s_window_r, s_window_c, s_window_w, s_inputs_l, s_inputs_r, s_inputs_t, s_inputs_c,
    s_gate_l, s_gate_r, s_gate_t, EPS, C,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, W: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    i_n, i_l = tl.program_id(0), tl.program_id(1).to(tl.int64)
    i_h, i_v = tl.program_id(2) // tl.cdiv(V, BLOCK_V), tl.program_id(2) % tl.cdiv(V, BLOCK_V)
    i_target = tl.load(p_target + i_n)
    if i_target < 0:
        return
    i_r = tl.load(p_rows + i_n)
    o_k, o_v = tl.arange(0, BLOCK_K), i_v * BLOCK_V + tl.arange(0, BLOCK_V)
    m_k, m_v = o_k < K, o_v < V
    c_k, c_v = H * K + i_h // (HV // H) * K + o_k, 2 * H * K + i_h * V + o_v
    p_window, p_inputs = (
        p_window + i_l * s_window_l + i_r * s_window_r,
        p_inputs + i_l * s_inputs_l + i_r * s_inputs_r,
    )
    p_gate = i_l * s_gate_l + i_r * s_gate_r + i_h
    p_weight, p_bias = p_weight + i_l * C * W, p_bias + i_l * C
    o_state = i_l * s_states_l + i_h * V * K + o_v[:, None] * K + o_k[None, :]
    m_state = m_v[:, None] & m_k[None, :]
    b_state = tl.load(
        p_states + tl.load(p_source + i_n) * s_states_s + o_state, mask=m_state, other=0.0
    ).to(tl.float32)
    b_rate = -tl.exp(tl.load(p_a_log + i_l * HV + i_h).to(tl.float32))
    b_shift = tl.load(p_dt_bias + i_l * HV + i_h).to(tl.float32)
    for i_t in range(tl.load(p_lengths + i_n)):
        b_k = _convolved(
            p_window,
            p_inputs,
            p_weight,
            p_bias,
            c_k,
            m_k,
            i_t,
            s_window_c,
            s_window_w,
            s_inputs_t,
            s_inputs_c,
            W,
            HAS_BIAS,
        )
        b_v = _convolved(
            p_window,
            p_inputs,
            p_weight,
            p_bias,
            c_v,
            m_v,
            i_t,
            s_window_c,
            s_window_w,
            s_inputs_t,
            s_inputs_c,
            W,
            HAS_BIAS,
        )
        b_k = b_k / tl.sqrt(tl.sum(b_k * b_k) + EPS)
        b_gate = tl.load(p_a + p_gate + i_t * s_gate_t).to(tl.float32) + b_shift
        # softplus; past 20 it is its argument.
        b_decay = tl.exp(
            b_rate * tl.where(b_gate > 20.0, b_gate, tl.log(1.0 + tl.exp(tl.minimum(b_gate, 20.0))))
        )
        b_beta = 1.0 / (1.0 + tl.exp(-tl.load(p_b + p_gate + i_t * s_gate_t).to(tl.float32)))
        b_state *= b_decay
        b_write = b_beta * (b_v - tl.sum(b_state * b_k[None, :], axis=1))
        b_state += b_write[:, None] * b_k[None, :]
    tl.store(p_states + i_target * s_states_s + o_state, b_state, mask=m_state)


def fold_(
    layers: RecurrentLayers,
    states: Tensor,
    kept: VerifyInputs,
    rows: Tensor,
    source: Tensor,
    target: Tensor,
    lengths: Tensor,
) -> None:
    """As `core.gated_delta.fold_`: states `[L, S, HV, V, K]` in place; rows, source, target and lengths int64 `[N]`. No host sync.

    Raises:
        ConfigError: the layers' activation is not silu.
    """
    if layers.activation not in ("silu", "swish"):
        raise ConfigError(f"activation: {layers.activation!r}; the fold kernel computes silu")
    window, inputs, a, b = kept
    assert a.stride() == b.stride() and a.stride(-1) == 1 and states[0, 0].is_contiguous()
    depth, channels, width = layers.conv_weight.shape
    grid = (len(rows), depth, layers.value_heads * triton.cdiv(layers.value_dim, BLOCK_V))
    bias = layers.conv_bias if layers.conv_bias is not None else layers.conv_weight
    _fold_kernel[grid](
        states, window, inputs, a, b, rows, source, target, lengths, layers.conv_weight.contiguous(), bias, layers.a_log, layers.dt_bias,
        states.stride(0), states.stride(1), *window.stride(), *inputs.stride(), *a.stride()[:3], NORM_EPS, channels,
        H=layers.key_heads, HV=layers.value_heads, K=layers.key_dim, V=layers.value_dim, W=width,
        BLOCK_K=triton.next_power_of_2(layers.key_dim), BLOCK_V=BLOCK_V, HAS_BIAS=layers.conv_bias is not None,
    )  # fmt: skip
