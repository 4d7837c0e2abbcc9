"""Attention of SGLang's Triton backend and of FlashAttention 3."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.fake_gpu.launches import kernel
from tests.fake_gpu.tensor import CudaTensor


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    allowed: Tensor | None,
    scale: float,
    cap: float,
    sinks: Tensor | None,
) -> Tensor:
    """Attention of one request in float32, `[n, heads, d]`. See `attend_and_sum`."""
    return attend_and_sum(q, k, v, allowed, scale, cap, sinks)[0]


def attend_and_sum(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    allowed: Tensor | None,
    scale: float,
    cap: float,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of one request in float32, and the logarithm of the sum of weights `[n, heads]`.

    Args:
        q: `[n, heads, d]`; k, v: `[m, kv_heads, d]`.
        allowed: `[n, m]`, which keys each query sees; None for all.
        sinks: `[heads]`, a logit that takes weight and gives nothing.
    """
    group = q.shape[1] // k.shape[1]
    k, v = (x.float().repeat_interleave(group, 1) for x in (k, v))
    scores = torch.einsum("nhd,mhd->hnm", q.float(), k) * scale
    if cap:
        scores = cap * torch.tanh(scores / cap)
    if allowed is not None:
        scores = scores.masked_fill(~allowed, float("-inf"))
    if sinks is not None:
        column = sinks.float().view(-1, 1, 1).expand(-1, scores.shape[1], 1)
        scores = torch.cat([scores, column], -1)
    weights = scores.softmax(-1)[..., : len(k)].nan_to_num(0.0)
    return torch.einsum("hnm,mhd->nhd", weights, v), scores.logsumexp(-1).T


def refuse(**options: Any) -> None:
    """Raises NotImplementedError for options that have no torch code here."""
    asked = [name for name, value in options.items() if value]
    if asked:
        raise NotImplementedError(f"no torch code for {asked}")


def extend_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    k_buffer: Tensor,
    v_buffer: Tensor,
    qo_indptr: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    custom_mask: Tensor | None,
    is_causal: bool,
    mask_indptr: Tensor | None,
    max_len_extend: int,
    k_scale: float,
    v_scale: float,
    sm_scale: float | None = None,
    logit_cap: float = 0.0,
    skip_prefix_custom_mask: bool = True,
    sliding_window_size: int = -1,
    sinks: Tensor | None = None,
    **more: Any,
) -> None:
    """SGLang's `extend_attention_fwd`: a prefix in the cache, then new tokens beside it."""
    refuse(
        **{name: more.get(name) for name in ("skip_prefix", "skip_extend", "score_mod")},
        lse_extend=more.get("lse_extend") is not None,
        xai_temperature_len=more.get("xai_temperature_len", -1) > 0,
    )
    k_rows, v_rows = (x.reshape(-1, *x.shape[-2:]) for x in (k_buffer, v_buffer))
    queries, prefixes = qo_indptr.tolist(), kv_indptr.tolist()
    scale = sm_scale or q.shape[-1] ** -0.5
    for b in range(len(queries) - 1):
        new = slice(queries[b], queries[b + 1])
        slots = kv_indices[prefixes[b] : prefixes[b + 1]].long()
        n, m = new.stop - new.start, len(slots)
        if not n:
            continue
        rows, columns = torch.arange(n).unsqueeze(1) + m, torch.arange(m + n)
        allowed = torch.ones(n, m + n, dtype=torch.bool)
        if is_causal or custom_mask is None:
            allowed = columns <= rows if is_causal else allowed
        if custom_mask is not None and mask_indptr is not None:
            start = int(mask_indptr[b])
            mask = custom_mask[start : start + n * (m + n)].view(n, m + n).bool()
            allowed = torch.ones(n, m + n, dtype=torch.bool)
            masked = slice(m if skip_prefix_custom_mask else 0, None)
            allowed[:, masked] = mask[:, masked]
        if sliding_window_size > 0:
            allowed = allowed & (rows - columns <= sliding_window_size)
        keys, values = (
            torch.cat([cache[slots].to(x.dtype), x[new]]) for cache, x in ((k_rows, k), (v_rows, v))
        )
        o[new] = attend(q[new], keys, values, allowed, scale, logit_cap, sinks).to(o.dtype)


def decode_attention(
    q: Tensor,
    k_buffer: Tensor,
    v_buffer: Tensor,
    o: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    attn_logits: Tensor,
    attn_lse: Tensor,
    num_kv_splits: Tensor,
    max_kv_splits: int,
    sm_scale: float,
    k_scale: float,
    v_scale: float,
    logit_cap: float = 0.0,
    sinks: Tensor | None = None,
    **more: Any,
) -> None:
    """SGLang's `decode_attention_fwd`: one query per request."""
    refuse(
        score_mod=more.get("score_mod"),
        has_mla=more.get("has_mla"),
        xai_temperature_len=more.get("xai_temperature_len", -1) > 0,
    )
    k_rows, v_rows = (x.reshape(-1, *x.shape[-2:]) for x in (k_buffer, v_buffer))
    starts = kv_indptr.tolist()
    for b in range(len(q)):
        slots = kv_indices[starts[b] : starts[b + 1]].long()
        if len(slots):
            keys, values = k_rows[slots], v_rows[slots]
            result = attend(q[b : b + 1], keys, values, None, sm_scale, logit_cap, sinks)
            o[b : b + 1] = result.to(o.dtype)


def paged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    cu_q: Tensor | None,
    cu_k: Tensor | None,
    used_k: Tensor | None,
    pages: Tensor | None,
    batch_index: Tensor | None,
    scale: float,
    causal: bool,
    left: int,
    right: int,
    cap: float,
    sinks: Tensor | None,
) -> None:
    """FlashAttention 3 over K/V of sequences in a row, or in pages `[pages, page_size, G, D]`."""
    queries = None if cu_q is None else cu_q.tolist()
    starts = None if cu_k is None else cu_k.tolist()
    for b in range(len(q) if queries is None else len(queries) - 1):
        mine = b if queries is None else slice(queries[b], queries[b + 1])
        used = None if used_k is None else int(used_k[b])
        if starts is not None:
            keys, values = (x[starts[b] : starts[b + 1]] for x in (k, v))
        else:
            rows = torch.tensor([b if batch_index is None else int(batch_index[b])])
            if pages is not None:
                rows = pages[b].long().clamp(0, len(k) - 1)
            count = -(-(k.shape[1] if used is None else used) // k.shape[1])
            if count > len(rows):
                # A GPU takes what lies behind the row in memory for pages.
                raise IndexError(
                    f"{used} keys of a request, and a page table for {len(rows)} pages"
                )
            rows = rows[:count]
            keys, values = k[rows].flatten(0, 1), v[rows].flatten(0, 1)
        keys, values = keys[:used], values[:used]
        n, m = len(q[mine]), len(keys)
        if not n:
            continue
        rows, columns = torch.arange(n).unsqueeze(1) + m - n, torch.arange(m)
        allowed = torch.ones(n, m, dtype=torch.bool)
        if causal:
            allowed &= columns <= rows
        if left >= 0:
            allowed &= columns >= rows - left
        if right >= 0 and not causal:
            allowed &= columns <= rows + right
        out[mine].copy_(attend(q[mine], keys, values, allowed, scale, cap, sinks))


def flash_attention_3(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_new: Any,
    v_new: Any,
    qv: Any,
    out: Any,
    *rest: Any,
    **named: Any,
) -> tuple[Tensor, Tensor]:
    """`sgl_kernel::fwd`; the order of its arguments is that of its schema."""
    (cu_q, cu_k, _cu_k_new, used_q, used_k, _max_q, _max_k, pages, batch_index, left_pad, cos) = (
        rest[:11]
    )
    _sin, _rotary_lengths, _q_scale, _k_scale, _v_scale, scale, causal, left, right, chunk, cap = (
        rest[11:22]
    )
    if q.dtype not in (torch.bfloat16, torch.float16):
        raise RuntimeError("FlashAttention only supports fp16, bf16, and fp8_e4m3 data type")
    given = {"k_new": k_new, "v_new": v_new, "qv": qv, "cos": cos, "left_pad": left_pad}
    refuse(
        **{name: x is not None for name, x in given.items()}, used_q=used_q is not None, chunk=chunk
    )
    sinks = named.get("sinks", rest[27] if len(rest) > 27 else None)
    if out is None:
        out = CudaTensor(torch.empty(*q.shape[:-1], v.shape[-1], dtype=q.dtype))
    scale = scale or q.shape[-1] ** -0.5
    kernel(paged_attention)(
        q, k, v, out, cu_q, cu_k, used_k, pages, batch_index, scale, causal, left, right, cap, sinks
    )
    return out, CudaTensor(torch.empty(q.shape[-2], len(q)))
