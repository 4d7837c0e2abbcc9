"""RMSNorm per head and RoPE: of a block's q and k in place, and of context keys on their way into
cache entries. One launch each. Names as in `gated_delta_fold`.

Letters in shapes: N tokens, L layers, H query heads, G kv heads, D head dim, S entries.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dflash_kernels.traffic import Traffic
from sglang_dflash.drafting.rope import Rotary

BLOCK_H = 16
# pi / 2 in parts (Cody and Waite). All but the last have at most 6 bits, so that their products
# with up to 2 ** 18 quarter turns are exact: long contexts keep the accuracy of float32 angles.
QUARTER_1 = tl.constexpr(1.5)
QUARTER_2 = tl.constexpr(9 / 2**7)
QUARTER_3 = tl.constexpr(31 / 2**16)
QUARTER_4 = tl.constexpr(45 / 2**22)
QUARTER_5 = tl.constexpr(7.549789948768648e-08)
QUARTERS_PER_RADIAN = tl.constexpr(0.6366197723675814)


@triton.jit
def _cos_sin(p_position, p_frequencies, o_f, m_f, FACTOR):
    """Cos and sin `[BLOCK_F]` of a token's angles, times the rotary's factor.

    By polynomials between -pi / 4 and pi / 4 (those of the Cephes library): the GPU's fast sine is
    inexact for large angles, and its exact one takes memory for very large ones.
    """
    b_angle = tl.load(p_position).to(tl.float32) * tl.load(p_frequencies + o_f, mask=m_f, other=0.0)
    b_quarters = tl.floor(b_angle * QUARTERS_PER_RADIAN + 0.5)
    b_x = b_angle - b_quarters * QUARTER_1
    b_x = b_x - b_quarters * QUARTER_2
    b_x = b_x - b_quarters * QUARTER_3
    b_x = b_x - b_quarters * QUARTER_4
    b_x = b_x - b_quarters * QUARTER_5
    b_z = b_x * b_x
    b_sin = (-1.9515295891e-4 * b_z + 8.3321608736e-3) * b_z - 1.6666654611e-1
    b_sin = b_sin * b_z * b_x + b_x
    b_cos = (2.443315711809948e-5 * b_z - 1.388731625493765e-3) * b_z + 4.166664568298827e-2
    b_cos = b_cos * b_z * b_z - 0.5 * b_z + 1.0
    i_quarter = b_quarters.to(tl.int32) & 3
    m_odd = (i_quarter & 1) == 1
    b_first, b_second = tl.where(m_odd, b_sin, b_cos), tl.where(m_odd, b_cos, b_sin)
    b_first = tl.where(((i_quarter + 1) & 2) == 2, -b_first, b_first)
    b_second = tl.where((i_quarter & 2) == 2, -b_second, b_second)
    return b_first * FACTOR, b_second * FACTOR


@triton.jit
def _norm_rotate(b_1, b_2, b_w1, b_w2, b_cos, b_sin, EPS, D: tl.constexpr):
    """Norm and rotate heads, given as their halves `[heads, BLOCK_F]`; weights broadcast."""
    b_mean = (tl.sum(b_1 * b_1, axis=1) + tl.sum(b_2 * b_2, axis=1)) / D
    b_scale = tl.rsqrt(b_mean + EPS)[:, None]
    b_1, b_2 = b_1 * b_scale * b_w1, b_2 * b_scale * b_w2
    return (
        b_1 * b_cos[None, :] - b_2 * b_sin[None, :],
        b_2 * b_cos[None, :] + b_1 * b_sin[None, :],
    )


@triton.jit
def _weight(p_q_weight, p_k_weight, o_f, m_q, m_f):
    """The norm's weights `[heads, BLOCK_F]` of query heads, and of kv heads behind them."""
    b_q = tl.load(p_q_weight + o_f, mask=m_f, other=0.0)[None, :]
    return tl.where(m_q, b_q, tl.load(p_k_weight + o_f, mask=m_f, other=0.0)[None, :])


@triton.jit(do_not_specialize=["p_positions"])
def qk_norm_rope_kernel(
    p_qkv, p_positions, p_q_weight, p_k_weight, p_frequencies, s_qkv, EPS, FACTOR,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_F: tl.constexpr,
):  # fmt: skip
    """One program per token and BLOCK_H heads of q and k."""
    i_n = tl.program_id(0).to(tl.int64)
    o_h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    o_f = tl.arange(0, BLOCK_F)
    m_f = o_f < D // 2
    b_cos, b_sin = _cos_sin(p_positions + i_n, p_frequencies, o_f, m_f, FACTOR)
    m_q, m_h = (o_h < H)[:, None], (o_h < H + G)[:, None] & m_f[None, :]
    b_w1 = _weight(p_q_weight, p_k_weight, o_f, m_q, m_f)
    b_w2 = _weight(p_q_weight, p_k_weight, o_f + D // 2, m_q, m_f)
    p_1 = p_qkv + i_n * s_qkv + o_h[:, None] * D + o_f[None, :]
    b_1 = tl.load(p_1, mask=m_h, other=0.0).to(tl.float32)
    b_2 = tl.load(p_1 + D // 2, mask=m_h, other=0.0).to(tl.float32)
    b_1, b_2 = _norm_rotate(
        b_1, b_2, b_w1.to(tl.float32), b_w2.to(tl.float32), b_cos, b_sin, EPS, D
    )
    tl.store(p_1, b_1.to(p_qkv.dtype.element_ty), mask=m_h)
    tl.store(p_1 + D // 2, b_2.to(p_qkv.dtype.element_ty), mask=m_h)


@triton.jit
def _finite(b, LIMIT: tl.constexpr):
    """NaN as 0, and others clamped to -LIMIT and LIMIT."""
    return tl.minimum(tl.maximum(tl.where(b == b, b, 0.0), -LIMIT), LIMIT)


@triton.jit(do_not_specialize=["p_entries", "p_positions"])
def write_context_kernel(
    p_cache, p_kv, p_entries, p_positions, p_k_weight, p_frequencies,
    s_cache_s, s_cache_l, s_kv_n, s_weight, EPS, FACTOR,
    G: tl.constexpr, D: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_F: tl.constexpr,
    LIMIT: tl.constexpr,
):  # fmt: skip
    """One program per token and layer."""
    i_n, i_l = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i_entry = tl.load(p_entries + i_n).to(tl.int64)
    if i_entry < 0:
        return
    o_g, o_f, o_d = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_F), tl.arange(0, 2 * BLOCK_F)
    m_g, m_f = (o_g < G)[:, None], o_f < D // 2
    m_v, m_k = m_g & (o_d < D)[None, :], m_g & m_f[None, :]
    p_kv += i_n * s_kv_n + i_l * 2 * G * D + o_g[:, None] * D
    p_cache += i_entry * s_cache_s + i_l * s_cache_l + o_g[:, None] * D
    b_v = tl.load(p_kv + G * D + o_d[None, :], mask=m_v, other=0.0).to(tl.float32)
    b_v = _finite(b_v, LIMIT).to(p_cache.dtype.element_ty)
    tl.store(p_cache + G * D + o_d[None, :], b_v, mask=m_v)
    b_cos, b_sin = _cos_sin(p_positions + i_n, p_frequencies, o_f, m_f, FACTOR)
    b_1 = tl.load(p_kv + o_f[None, :], mask=m_k, other=0.0).to(tl.float32)
    b_2 = tl.load(p_kv + D // 2 + o_f[None, :], mask=m_k, other=0.0).to(tl.float32)
    p_k_weight += i_l * s_weight + o_f
    b_w1 = tl.load(p_k_weight, mask=m_f, other=0.0).to(tl.float32)[None, :]
    b_w2 = tl.load(p_k_weight + D // 2, mask=m_f, other=0.0).to(tl.float32)[None, :]
    b_1, b_2 = _norm_rotate(b_1, b_2, b_w1, b_w2, b_cos, b_sin, EPS, D)
    b_1 = _finite(b_1, LIMIT).to(p_cache.dtype.element_ty)
    b_2 = _finite(b_2, LIMIT).to(p_cache.dtype.element_ty)
    tl.store(p_cache + o_f[None, :], b_1, mask=m_k)
    tl.store(p_cache + D // 2 + o_f[None, :], b_2, mask=m_k)


def qk_norm_rope(
    qkv: Tensor,
    positions: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    rotary: Rotary,
    heads: int,
    eps: float,
) -> None:
    """Norm and rotate q and k in place; v stays.

    Args:
        qkv: `[N, (H + 2 G) D]`, rows of any stride. D is even.
        positions: int `[N]`, contiguous.
        q_weight, k_weight: `[D]`.
        rotary: frequencies on qkv's device.
        heads: H.
        eps: of the norms.
    """
    count, head_dim = len(qkv), len(q_weight)
    if not count:
        return
    kv_heads = (qkv.shape[1] // head_dim - heads) // 2
    qk_norm_rope_kernel[(count, triton.cdiv(heads + kv_heads, BLOCK_H))](
        qkv, positions, q_weight, k_weight, rotary.frequencies, qkv.stride(0),
        eps, rotary.attention_factor, H=heads, G=kv_heads, D=head_dim, BLOCK_H=BLOCK_H,
        BLOCK_F=triton.next_power_of_2(head_dim // 2),
    )  # fmt: skip


def write_context(
    cache: Tensor,
    kv: Tensor,
    entries: Tensor,
    positions: Tensor,
    k_weights: Tensor,
    rotary: Rotary,
    eps: float,
) -> None:
    """See its twin, `TorchOps.write_context`, whose arguments these are. A token with a negative
    entry is skipped.

    `cache` `[S, L, 2, G, D]` is contiguous but for the first two strides, `kv` `[N, L, 2, G, D]`
    but for the first one, `k_weights` `[L, D]` has unit stride over D, `positions` is contiguous.
    """
    count, depth, _, kv_heads, head_dim = kv.shape
    if not count:
        return
    write_context_kernel[(count, depth)](
        cache, kv, entries, positions, k_weights, rotary.frequencies,
        *cache.stride()[:2], kv.stride(0), k_weights.stride(0), eps, rotary.attention_factor,
        G=kv_heads, D=head_dim, BLOCK_G=triton.next_power_of_2(kv_heads),
        BLOCK_F=triton.next_power_of_2(head_dim // 2), LIMIT=torch.finfo(cache.dtype).max,
    )  # fmt: skip


def traffic(count: int, heads: int, kv_heads: int, head_dim: int, itemsize: int) -> Traffic:
    """Bytes of one launch of `qk_norm_rope`, with int64 `positions`."""
    values = count * (heads + kv_heads) * head_dim * itemsize
    programs = count * triton.cdiv(heads + kv_heads, BLOCK_H)
    shared = 8 + 2 * head_dim * itemsize + 2 * head_dim
    return Traffic(values + programs * shared, values)


def write_context_traffic(
    count: int,
    cached: int,
    depth: int,
    kv_heads: int,
    head_dim: int,
    itemsize: int,
    cache_itemsize: int,
) -> Traffic:
    """Bytes of one launch of `write_context` on `count` tokens, of which `cached` have an entry.

    `entries` and `positions` are int64."""
    values = cached * depth * 2 * kv_heads * head_dim
    shared = 8 + head_dim * itemsize + 2 * head_dim
    read = count * depth * 8 + cached * depth * shared + values * itemsize
    return Traffic(read, values * cache_itemsize)
