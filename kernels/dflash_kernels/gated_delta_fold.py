"""Fold accepted tokens of a block into Gated DeltaNet states, and move the convolution's windows: a
launch each, for all layers and rows, prefix-cache checkpoints included.

Letters in shapes and names of strides are those of `sglang_dflash.drafting.recurrent.replay`. In
the kernels: `i_` index, `o_` offsets, `m_` mask, `p_` pointer, `b_` block value, `s_` stride.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from dflash_kernels.traffic import Traffic
from sglang_dflash.common.errors import ConfigError
from sglang_dflash.drafting.recurrent.gated_delta import NORM_EPS
from sglang_dflash.drafting.recurrent.replay import Moves, RecurrentLayers, VerifyInputs

# Value rows of a state tile. Compiled for sm_80 to sm_120 with K = 128, 16 rows take 96 registers
# per thread and 32 rows take 165 to 168, without spills.
BLOCK_V = 16
WINDOW_BLOCK = 1024


@triton.jit
def _conv_silu(p_window, p_inputs, p_weight, p_bias, m_c, i_t, s_window_w, s_inputs_t,
               W: tl.constexpr, HAS_BIAS: tl.constexpr):  # fmt: skip
    """silu(conv) of a channel block at block position `i_t`, float32 after rounding to p_inputs.

    The pointers are blocks: they point at the channels. Rounds where SGLang's kernels of decode and
    verify do (`_causal_conv1d_update_kernel`): products in the inputs' dtype, sums in float32 from
    the bias on.
    """
    b_sum = tl.zeros(m_c.shape, dtype=tl.float32)
    if HAS_BIAS:
        b_sum += tl.load(p_bias, mask=m_c, other=0.0).to(tl.float32)
    for i_w in tl.static_range(W):
        # Before the block's start, inputs come from the window.
        i_s = i_t - (W - 1) + i_w
        p_old, p_new = p_window + (W - 1 + i_s) * s_window_w, p_inputs + i_s * s_inputs_t
        b_old = tl.load(p_old, mask=m_c & (i_s < 0), other=0.0)
        b_new = tl.load(p_new, mask=m_c & (i_s >= 0), other=0.0)
        b_sum += tl.where(i_s < 0, b_old, b_new) * tl.load(p_weight + i_w, mask=m_c, other=0.0)
    b_out = b_sum / (1.0 + tl.exp(-b_sum))
    return b_out.to(p_inputs.dtype.element_ty).to(tl.float32)


@triton.jit
def _gates(p_a, p_b, b_rate, b_shift):
    """Decay and write strength of one token and value head."""
    b_a = tl.load(p_a).to(tl.float32) + b_shift
    # Above 20, softplus is its argument.
    b_softplus = tl.where(b_a > 20.0, b_a, tl.log(1.0 + tl.exp(tl.minimum(b_a, 20.0))))
    return tl.exp(b_rate * b_softplus), 1.0 / (1.0 + tl.exp(-tl.load(p_b).to(tl.float32)))


@triton.heuristics(
    {
        "HAS_BIAS": lambda args: args["p_bias"] is not None,
        "HAS_CHECKPOINTS": lambda args: args["p_checkpoints"] is not None,
    }
)
@triton.jit
def fold_kernel(
    p_states, p_window, p_inputs, p_a, p_b,
    p_rows, p_before, p_after, p_lengths, p_checkpoints, p_steps,
    p_weight, p_bias, p_a_log, p_dt_bias, s_states_l, s_states_s,
    s_window_l, s_window_r, s_window_c, s_window_w,
    s_inputs_l, s_inputs_r, s_inputs_t, s_inputs_c,
    s_gate_l, s_gate_r, s_gate_t, EPS, C,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, W: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_CHECKPOINTS: tl.constexpr,
):  # fmt: skip
    """One program per row, layer, and tile of BLOCK_V value rows of a value head."""
    i_n, i_l = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    i_hv = tl.program_id(2).to(tl.int64)
    i_h, i_v = i_hv // tl.cdiv(V, BLOCK_V), i_hv % tl.cdiv(V, BLOCK_V)
    i_after = tl.load(p_after + i_n)
    if i_after < 0:
        return
    i_r = tl.load(p_rows + i_n)
    o_k, o_v = tl.arange(0, BLOCK_K), i_v * BLOCK_V + tl.arange(0, BLOCK_V)
    m_k, m_v = o_k < K, o_v < V
    # Channels of the key and of the value rows.
    o_ck, o_cv = H * K + i_h // (HV // H) * K + o_k, 2 * H * K + i_h * V + o_v
    p_window += i_l * s_window_l + i_r * s_window_r
    p_inputs += i_l * s_inputs_l + i_r * s_inputs_r
    p_weight += i_l * C * W
    p_k_bias, p_v_bias = p_weight, p_weight
    if HAS_BIAS:
        p_k_bias, p_v_bias = p_bias + i_l * C + o_ck, p_bias + i_l * C + o_cv
    p_k_window, p_v_window = p_window + o_ck * s_window_c, p_window + o_cv * s_window_c
    p_k_inputs, p_v_inputs = p_inputs + o_ck * s_inputs_c, p_inputs + o_cv * s_inputs_c
    p_k_weight, p_v_weight = p_weight + o_ck * W, p_weight + o_cv * W
    o_gate = i_l * s_gate_l + i_r * s_gate_r + i_h
    o_state = i_l * s_states_l + i_h * V * K + o_v[:, None] * K + o_k[None, :]
    m_state = m_v[:, None] & m_k[None, :]
    p_old = p_states + tl.load(p_before + i_n) * s_states_s + o_state
    b_state = tl.load(p_old, mask=m_state, other=0.0).to(tl.float32)
    b_rate = -tl.exp(tl.load(p_a_log + i_l * HV + i_h).to(tl.float32))
    b_shift = tl.load(p_dt_bias + i_l * HV + i_h).to(tl.float32)
    i_due, p_checkpoint = 0, p_states
    if HAS_CHECKPOINTS:
        i_checkpoint = tl.load(p_checkpoints + i_n)
        i_due = tl.where(i_checkpoint >= 0, tl.load(p_steps + i_n), 0)
        p_checkpoint += i_checkpoint * s_states_s
    for i_t in range(tl.load(p_lengths + i_n)):
        b_k = _conv_silu(p_k_window, p_k_inputs, p_k_weight, p_k_bias, m_k, i_t,
                         s_window_w, s_inputs_t, W, HAS_BIAS)  # fmt: skip
        b_v = _conv_silu(p_v_window, p_v_inputs, p_v_weight, p_v_bias, m_v, i_t,
                         s_window_w, s_inputs_t, W, HAS_BIAS)  # fmt: skip
        b_k = b_k / tl.sqrt(tl.sum(b_k * b_k) + EPS)
        b_decay, b_beta = _gates(p_a + o_gate + i_t * s_gate_t, p_b + o_gate + i_t * s_gate_t,
                                 b_rate, b_shift)  # fmt: skip
        b_state *= b_decay
        b_v = b_beta * (b_v - tl.sum(b_state * b_k[None, :], axis=1))
        b_state += b_v[:, None] * b_k[None, :]
        if HAS_CHECKPOINTS:  # noqa: SIM102 (it is decided when the kernel is compiled)
            if i_t + 1 == i_due:
                tl.store(p_checkpoint + o_state, b_state, mask=m_state)
    tl.store(p_states + i_after * s_states_s + o_state, b_state, mask=m_state)


@triton.heuristics({"HAS_CHECKPOINTS": lambda args: args["p_checkpoints"] is not None})
@triton.jit
def move_windows_kernel(
    p_pool, p_windows, p_rows, p_after, p_lengths, p_checkpoints, p_steps,
    s_pool_l, s_pool_s, s_pool_c, s_pool_w,
    s_windows_l, s_windows_r, s_windows_t, s_windows_c, s_windows_w,
    C, HISTORY: tl.constexpr, BLOCK: tl.constexpr, HAS_CHECKPOINTS: tl.constexpr,
):  # fmt: skip
    """One program per row, layer and BLOCK channels."""
    i_n, i_l = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    i_after = tl.load(p_after + i_n)
    if i_after < 0:
        return
    o_c = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    m_c = o_c < C
    p_windows += i_l * s_windows_l + tl.load(p_rows + i_n) * s_windows_r + o_c * s_windows_c
    p_pool += i_l * s_pool_l + o_c * s_pool_c
    p_from = p_windows + (tl.load(p_lengths + i_n) - 1) * s_windows_t
    for i_w in tl.static_range(HISTORY):
        b_input = tl.load(p_from + i_w * s_windows_w, mask=m_c)
        tl.store(p_pool + i_after * s_pool_s + i_w * s_pool_w, b_input, mask=m_c)
    if HAS_CHECKPOINTS:
        i_checkpoint = tl.load(p_checkpoints + i_n)
        if i_checkpoint >= 0:
            p_from = p_windows + (tl.load(p_steps + i_n) - 1) * s_windows_t
            for i_w in tl.static_range(HISTORY):
                b_input = tl.load(p_from + i_w * s_windows_w, mask=m_c)
                tl.store(p_pool + i_checkpoint * s_pool_s + i_w * s_pool_w, b_input, mask=m_c)


def fold_(layers: RecurrentLayers, states: Tensor, verified: VerifyInputs, moves: Moves) -> None:
    """As `drafting.recurrent.replay.fold_`, without a host synchronization.

    Raises:
        ConfigError: the layers' activation is not silu.
        ValueError: a and b are not strided alike with unit stride over heads, or a state is not
            contiguous.
    """
    if layers.activation not in ("silu", "swish"):
        raise ConfigError("activation", layers.activation, "the fold kernel computes silu")
    window, inputs, a, b = verified
    if a.stride() != b.stride() or a.stride(-1) != 1:
        raise ValueError(f"a and b need equal strides and unit stride over heads, got {a.stride()}")
    if not states[0, 0].is_contiguous():
        raise ValueError(f"each state must be contiguous, got strides {states.stride()}")
    depth, channels, width = layers.conv_weight.shape
    bias = layers.conv_bias
    grid = (len(moves.rows), depth, layers.value_heads * triton.cdiv(layers.value_dim, BLOCK_V))
    fold_kernel[grid](
        states, window, inputs, a, b,
        *moves,
        layers.conv_weight.contiguous(), None if bias is None else bias.contiguous(),
        layers.a_log.contiguous(), layers.dt_bias.contiguous(),
        *states.stride()[:2],
        *window.stride(),
        *inputs.stride(),
        *a.stride()[:3],
        NORM_EPS, channels,
        H=layers.key_heads, HV=layers.value_heads, K=layers.key_dim, V=layers.value_dim, W=width,
        BLOCK_K=triton.next_power_of_2(layers.key_dim), BLOCK_V=BLOCK_V,
    )  # fmt: skip


def move_windows_(pool: Tensor, windows: Tensor, moves: Moves) -> None:
    """As `drafting.recurrent.replay.move_windows_`, without a host synchronization."""
    depth, _, channels, history = pool.shape
    rows, _, *others = moves
    move_windows_kernel[(len(rows), depth, triton.cdiv(channels, WINDOW_BLOCK))](
        pool, windows, rows, *others, *pool.stride(), *windows.stride(),
        channels, HISTORY=history, BLOCK=WINDOW_BLOCK,
    )  # fmt: skip


def traffic(
    layers: RecurrentLayers,
    states: Tensor,
    verified: VerifyInputs,
    lengths: Sequence[int],
    checkpoints: int | None = None,
) -> Traffic:
    """Bytes of one launch of `fold_`, with int64 `moves`.

    Reads shapes and dtypes of the tensors only.

    Args:
        lengths: accepted tokens of the rows that are not skipped.
        checkpoints: how many of these have one; None if `moves` names none.
    """
    depth, _, width = layers.conv_weight.shape
    key_dim, value_dim = layers.key_dim, layers.value_dim
    tiles = triton.cdiv(value_dim, BLOCK_V)
    state = value_dim * key_dim * states.element_size()
    # Of a head: each tile of value rows needs the whole key.
    read_channels = tiles * key_dim + value_dim
    tap = verified.inputs.element_size() + layers.conv_weight.element_size()
    bias = 0 if layers.conv_bias is None else layers.conv_bias.element_size()
    token = read_channels * (width * tap + bias) + tiles * 2 * verified.a.element_size()
    fixed = 32 + layers.a_log.element_size() + layers.dt_bias.element_size()
    fixed += 0 if checkpoints is None else 16
    heads = depth * layers.value_heads
    read = len(lengths) * (state + tiles * fixed) + sum(lengths) * token
    return Traffic(heads * read, heads * (len(lengths) + (checkpoints or 0)) * state)


def window_traffic(pool: Tensor, count: int, checkpoints: int | None = None) -> Traffic:
    """Bytes of one launch of `move_windows_` for `count` rows that are not skipped; `checkpoints`
    as in `traffic`."""
    depth, _, channels, history = pool.shape
    windows = (count + (checkpoints or 0)) * channels * history * pool.element_size()
    numbers = count * 3 if checkpoints is None else count * 4 + checkpoints
    read = triton.cdiv(channels, WINDOW_BLOCK) * numbers * 8
    return Traffic(depth * (read + windows), depth * windows)
