"""SGLang's paged KV pool without Triton, and attention over it in torch: prefill, decode and verify
of a drafted block."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.memory_pool import KVWriteLoc, MHATokenToKVPool, move_kv_cache_native
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from torch import Tensor

# Queries per attention call: bounds the mask of a long prefill to QUERY_CHUNK x context.
QUERY_CHUNK = 512


@dataclass(frozen=True)
class Span:
    """One request of a forward.

    Attributes:
        rows: its query rows.
        prefix: how many tokens precede them.
        slots: the KV slots of prefix and queries, int64 `[prefix + n]`.
        sliding: those of sliding layers, which may have a pool of their own.
        masks: made by the first layer that needs them, shared by the others.
    """

    rows: slice
    prefix: int
    slots: Tensor
    sliding: Tensor
    masks: dict[tuple[int, int | None], Tensor] = field(default_factory=dict)

    def mask(self, start: int, count: int, groups: int, window: int | None) -> Tensor:
        """Bool `[groups * count, prefix + start + count]` of the query rows from `start` on."""
        key = (start, window)
        if key not in self.masks:
            first = self.prefix + start
            self.masks[key] = visible(first, count, first + count, window).repeat(groups, 1)
        return self.masks[key]


class CpuAttentionBackend(AttentionBackend):
    """One request at a time: a request's result does not depend on what it is batched with."""

    def __init__(self, model_runner: Any) -> None:
        super().__init__()
        self.req_to_token_pool = model_runner.req_to_token_pool
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        self.spans: list[Span] = []
        self.sliding_loc: Tensor | None = None

    def support_triton(self) -> bool:
        return False

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Find every request's rows and KV slots once; all layers share them."""
        mode = forward_batch.forward_mode
        if mode.is_idle():
            self.spans = []
            return
        self.sliding_loc = self._sliding(forward_batch.out_cache_loc)
        lengths = forward_batch.seq_lens.tolist()
        if mode.is_decode():
            prefixes, counts = [n - 1 for n in lengths], [1] * len(lengths)
        elif mode.is_target_verify():
            # The drafted block comes after the committed tokens that seq_lens counts.
            prefixes, counts = lengths, [forward_batch.spec_info.draft_token_num] * len(lengths)
        else:
            prefixes, counts = (
                forward_batch.extend_prefix_lens.tolist(),
                forward_batch.extend_seq_lens.tolist(),
            )
        table, row, self.spans = self.req_to_token_pool.req_to_token, 0, []
        for request, prefix, count in zip(
            forward_batch.req_pool_indices.tolist(), prefixes, counts, strict=True
        ):
            slots = table[request, : prefix + count].long()
            self.spans.append(Span(slice(row, row + count), prefix, slots, self._sliding(slots)))
            row += count

    def _sliding(self, slots: Tensor) -> Tensor:
        """The slots of the same tokens for sliding layers. Those of tokens that have left every
        window are gone: the slot for padding stands for them."""
        pool = self.token_to_kv_pool
        return pool.translate_loc_from_full_to_swa(slots) if isinstance(pool, SWAKVPool) else slots

    def forward_extend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: RadixAttention,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **others: Any,
    ) -> Tensor:
        """q `[N, H * D]`, k and v `[N, G * D]` of this forward's tokens; returns `[N, H * Dv]`.

        Raises:
            NotImplementedError: the layer is a cross attention, has attention sinks, or caps its
                logits.
        """
        unserved = {
            "cross attention": layer.is_cross_attention,
            "an attention sink": others.get("sinks") is not None,
            "a cap on attention logits": layer.logit_cap,
        }
        for kind, present in unserved.items():
            if present:
                raise NotImplementedError(f"{kind} is not served on the plain-CPU platform")
        if save_kv_cache and k is not None:
            where = KVWriteLoc(forward_batch.out_cache_loc, self.sliding_loc)
            self.token_to_kv_pool.set_kv_buffer(layer, where, k, v)
        slides = layer.sliding_window_size is not None and layer.sliding_window_size > -1
        keys = self.token_to_kv_pool.get_key_buffer(layer.layer_id)
        values = self.token_to_kv_pool.get_value_buffer(layer.layer_id)
        q = q.reshape(
            -1, layer.tp_k_head_num, layer.tp_q_head_num // layer.tp_k_head_num, layer.qk_head_dim
        )  # [N, G, g, D]
        out = q.new_zeros(q.shape[0], layer.tp_q_head_num * layer.v_head_dim)
        for span in self.spans:
            slots = span.sliding if slides else span.slots
            out[span.rows] = attend(q[span.rows], keys[slots], values[slots], span, layer)
        return out

    forward_decode = forward_extend


def attend(q: Tensor, k: Tensor, v: Tensor, span: Span, layer: RadixAttention) -> Tensor:
    """One request's attention: q `[n, G, g, D]` over k and v `[prefix + n, G, D]`.

    Returns `[n, G * g * D]`. The g query heads that share a kv head become rows of it, so that no K
    or V is repeated.
    """
    k, v = (t.to(q.dtype).transpose(0, 1) for t in (k, v))  # [G, prefix + n, D]
    causal = layer.attn_type != AttentionType.ENCODER_ONLY
    window = layer.sliding_window_size
    window = window if causal and window is not None and window > -1 else None
    out = []
    for start in range(0, len(q), QUERY_CHUNK):
        rows = q[start : start + QUERY_CHUNK]
        count, groups = rows.shape[0], rows.shape[2]
        seen = span.prefix + start + count if causal else k.shape[1]
        # A single query at the end sees all of it.
        masked = causal and (count > 1 or window is not None)
        mask = span.mask(start, count, groups, window) if masked else None
        folded = rows.permute(1, 2, 0, 3).flatten(1, 2)  # [G, g * n, D]
        attended = F.scaled_dot_product_attention(
            folded[None], k[None, :, :seen], v[None, :, :seen], mask, scale=layer.scaling
        )[0]
        out.append(attended.unflatten(1, (groups, count)).permute(2, 0, 1, 3).flatten(1))
    return torch.cat(out)


def visible(first: int, count: int, seen: int, window: int | None) -> Tensor:
    """Bool `[count, seen]`: which of the first `seen` tokens the queries may attend to.

    The queries are at positions `first ... first + count - 1`.
    """
    queries, keys = torch.arange(first, first + count)[:, None], torch.arange(seen)
    mask = keys <= queries
    return mask if window is None else mask & (keys >= queries - window)


class CpuKVPool(MHATokenToKVPool):
    """The engine's MHA pool with moves done by indexing instead of a Triton copy."""

    def _init_kv_copy_and_warmup(self) -> None:
        self._kv_copy_config = None

    def _move_kv_cache_impl(self, tgt_loc: Tensor, src_loc: Tensor) -> None:
        move_kv_cache_native(self.k_buffer, self.v_buffer, tgt_loc, src_loc)


def speculative_cache_locs(
    *,
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    end_offset: Tensor,
    batch_size: int,
    draft_token_num: int,
    device: Any,
) -> Tensor:
    """KV slots of every request's next positions, int64 `[batch_size * draft_token_num]`."""
    positions = start_offset.long()[:, None] + torch.arange(draft_token_num)
    return req_to_token[req_pool_indices.long()[:, None], positions].long().flatten()
