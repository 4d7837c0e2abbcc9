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

from sglang_dflash.plugins.platform_cpu import ATTENTION_BACKEND

# Queries per attention call: bounds the mask of a long prefill to QUERY_CHUNK x context.
QUERY_CHUNK = 512
# If the last block of 32 rows has fewer rows than this, SDPA sums some of them in another order.
FEW_ROWS = 8
# Elements that torch computes at a time: a multiple of the vector length of every CPU.
WHOLE = 64


def padded_columns(tokens: int) -> int:
    """Return the number of columns to which a context of `tokens` tokens is padded.

    SDPA sums over blocks of columns whose borders depend on the number of columns. With these
    numbers, a query's result has the same bits whatever the padding.
    """
    for columns in (64, 128):
        if tokens <= columns:
            return columns
    return -tokens // 512 * -512


@dataclass(frozen=True)
class AttentionCall:
    """Queries of one attention call: the same number of queries for each of R requests.

    Attributes:
        rows: rows of the queries in the batch, request after request.
        count: queries per request, n.
        first: position of each request's first query, int64 `[R]`.
        length: number of tokens of each request, int64 `[R]`.
        slots: KV slots of each request's tokens, int64 `[R * C]`. The last one is repeated up to
            the padded length, so that padding holds finite values if the request does.
        sliding: slots for sliding layers, which may have a pool of their own.
        masks: filled by the first layer that needs a mask, shared by the others.
    """

    rows: slice | Tensor
    count: int
    first: Tensor
    length: Tensor
    slots: Tensor
    sliding: Tensor
    masks: dict[tuple[int, int | None, bool], Tensor] = field(default_factory=dict)

    def mask(self, groups: int, window: int | None, causal: bool, dtype: torch.dtype) -> Tensor:
        """Return the mask that is added to scores, `[R, 1, 1 or rows, C]`: 0 for visible columns,
        -inf for others.

        The rows are g x n (`groups` times the queries), plus those that `missing_rows` adds.
        """
        key = (groups, window, causal)
        if key not in self.masks:
            requests, at = len(self.first), torch.arange(self.count)
            columns = torch.arange(len(self.slots) // requests)
            if causal:
                queries = (self.first[:, None] + at)[..., None]
                visible = columns <= queries
                if window is not None:
                    visible &= columns >= queries - window
            else:
                visible = (columns < self.length[:, None, None]).expand(-1, self.count, -1)
            mask = torch.zeros(visible.shape, dtype=dtype).masked_fill_(~visible, -torch.inf)
            if self.count > 1:
                added = missing_rows(groups * self.count)
                mask = F.pad(mask.repeat(1, groups, 1), (0, 0, 0, added))
            self.masks[key] = mask[:, None]
        return self.masks[key]


def missing_rows(rows: int) -> int:
    """Return the number of padding rows with which SDPA gives all rows the same bits as in a larger
    call."""
    return -rows % FEW_ROWS if 0 < rows % 32 < FEW_ROWS else 0


class CpuAttentionBackend(AttentionBackend):
    """Attention whose results have the same bits whatever else is in the batch.

    Requests of one call have the same padded context length, which depends on their own length
    only.

    Attributes:
        rows: row of each request in the request-to-token table, int64.
        prefixes: tokens of each request before this forward.
        counts: tokens of each request in this forward.
    """

    rows: Tensor
    prefixes: list[int]
    counts: list[int]

    def __init__(self, model_runner: Any) -> None:
        super().__init__()
        if model_runner.use_mla_backend:
            use_latent_attention()
        self.req_to_token_pool = model_runner.req_to_token_pool
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        self.pieces: dict[bool, list[AttentionCall]] = {}
        self.write_loc: Any = None

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Find every request's rows and KV slots once; all layers share them."""
        mode = forward_batch.forward_mode
        self.pieces = {}
        if mode.is_idle():
            self.pieces = {True: [], False: []}
            return
        out = forward_batch.out_cache_loc
        self.write_loc = KVWriteLoc(out, self._sliding(out))
        self.rows = forward_batch.req_pool_indices.long()
        lengths = forward_batch.seq_lens.tolist()
        if mode.is_decode():
            self.prefixes, self.counts = [n - 1 for n in lengths], [1] * len(lengths)
        elif mode.is_target_verify():
            # The drafted block comes after the committed tokens that seq_lens counts.
            self.prefixes = lengths
            self.counts = [forward_batch.spec_info.draft_token_num] * len(lengths)
        else:
            self.prefixes = forward_batch.extend_prefix_lens.tolist()
            self.counts = forward_batch.extend_seq_lens.tolist()

    def _sliding(self, slots: Tensor) -> Tensor:
        """Translate slots for sliding layers. Tokens that have left every window have no slot left,
        and get the padding slot."""
        pool = self.token_to_kv_pool
        return pool.translate_loc_from_full_to_swa(slots) if isinstance(pool, SWAKVPool) else slots

    def _pieces(self, causal: bool) -> list[AttentionCall]:
        """The forward's attention calls. If not causal, every query sees the whole request."""
        if causal not in self.pieces:
            self.pieces[causal] = [
                self._piece(*key, *members) for key, members in self._calls(causal).items()
            ]
        return self.pieces[causal]

    def _calls(self, causal: bool) -> dict[tuple[int, int], tuple[list[int], ...]]:
        """Group queries into attention calls.

        Returns:
            `(padded columns, queries per request)` -> four lists with an element per request: its
            index, its first query row, the position of its first query, its length.
        """
        calls: dict[tuple[int, int], tuple[list[int], ...]] = {}
        row = 0
        for request, (prefix, count) in enumerate(zip(self.prefixes, self.counts, strict=True)):
            for start in range(0, count, QUERY_CHUNK):
                queries = min(QUERY_CHUNK, count - start)
                length = prefix + (start + queries if causal else count)
                key = (padded_columns(length), queries)
                members = calls.setdefault(key, ([], [], [], []))
                member = (request, row + start, prefix + start, length)
                for values, value in zip(members, member, strict=True):
                    values.append(value)
            row += count
        return calls

    def _piece(
        self,
        columns: int,
        count: int,
        requests: list[int],
        rows: list[int],
        first: list[int],
        lengths: list[int],
    ) -> AttentionCall:
        length = torch.tensor(lengths)
        at = torch.arange(columns).minimum(length[:, None] - 1)
        table_rows = self.rows[requests]
        slots = self.req_to_token_pool.req_to_token[table_rows[:, None], at].long().flatten()
        last = rows[0] + count * len(rows)
        adjacent = rows == list(range(rows[0], last, count))
        where = (
            slice(rows[0], last)
            if adjacent
            else (torch.tensor(rows)[:, None] + torch.arange(count)).flatten()
        )
        return AttentionCall(where, count, torch.tensor(first), length, slots, self._sliding(slots))

    def forward_extend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: RadixAttention,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **options: Any,
    ) -> Tensor:
        """q `[N, H * D]`, k and v `[N, G * D]` of this forward's tokens; returns `[N, H * Dv]`.

        Args:
            options: `sinks` `[H]` are learned logits, one per head (see `attend`).

        Raises:
            NotImplementedError: the layer is a cross attention, selects the tokens that it attends
                to, or caps its logits.
        """
        _check(layer, options)
        sinks = options.get("sinks")
        pool = self.token_to_kv_pool
        if save_kv_cache and k is not None:
            pool.set_kv_buffer(layer, self.write_loc, k, v)
        causal = layer.attn_type != AttentionType.ENCODER_ONLY
        keys, values = pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)
        pieces = self._pieces(causal)
        if len(pieces) == 1 and isinstance(pieces[0].rows, slice):
            rows = pieces[0].rows.stop
            out = attend(q[:rows], keys, values, pieces[0], layer, sinks)
            return out if rows == len(q) else F.pad(out, (0, 0, 0, len(q) - rows))
        out = q.new_zeros(q.shape[0], layer.tp_q_head_num * layer.v_head_dim)
        for piece in pieces:
            out[piece.rows] = attend(q[piece.rows], keys, values, piece, layer, sinks)
        return out

    forward_decode = forward_extend


def _check(layer: RadixAttention, options: dict[str, Any]) -> None:
    refused = {
        "cross attention": layer.is_cross_attention,
        "a cap on attention logits": layer.logit_cap,
        "attention to chosen tokens": options.get("topk_indices") is not None,
        "a sink of latent attention": options.get("attn_sink") is not None,
    }
    for feature, is_needed in refused.items():
        if is_needed:
            raise NotImplementedError(f"{feature} is not served on the plain-CPU platform")


def use_latent_attention() -> None:
    """Make SGLang's multi-head latent attention (DeepSeek, Kimi, GLM) attend to the cached latent
    K/V, one head, in every forward. By default, a prefill without a prefix computes K and V of all
    heads and passes them to the backend instead of the pool."""
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
    from sglang.srt.models.deepseek_common.attention_forward_methods import AttnForwardMethod

    AttentionBackendRegistry.register(ATTENTION_BACKEND, lambda *_: AttnForwardMethod.MLA)


def attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    piece: AttentionCall,
    layer: RadixAttention,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of some queries `[R * n, H * D]` over a layer's K `[slots, G, D]` and V
    `[slots, G, Dv]`.

    Returns `[R * n, H * Dv]`. The g query heads that share a kv head become rows of it, so that no
    K or V is repeated. A sink `[H]` is one more logit of each query of its head, and has no value.
    """
    requests, kv_heads = len(piece.first), layer.tp_k_head_num
    groups, count = layer.tp_q_head_num // kv_heads, piece.count
    causal = layer.attn_type != AttentionType.ENCODER_ONLY
    window = layer.sliding_window_size
    slides = window is not None and window > -1
    slots = piece.sliding if slides else piece.slots
    q = q.reshape(requests, count, kv_heads, groups, -1).permute(0, 2, 3, 1, 4).flatten(2, 3)
    rows = groups * count
    added, width = missing_rows(rows), max(q.shape[-1], values.shape[-1])
    q = _pad(q, added, width)
    k, v = (
        t.index_select(0, slots).view(requests, -1, *t.shape[1:]).transpose(1, 2).to(q.dtype)
        for t in (keys, values)
    )
    k, v = _pad(k, 0, width), _pad(v, 0, width)
    mask = piece.mask(groups, window if causal and slides else None, causal, q.dtype)
    if sinks is not None:
        sinks = F.pad(sinks.view(-1, groups).repeat_interleave(count, dim=1), (0, added))
    out = _attend_padded(q, k, v, mask, layer.scaling, sinks)[:, :, :rows, : values.shape[-1]]
    out = out.unflatten(2, (groups, count)).permute(0, 3, 1, 2, 4)  # [R, n, G, g, Dv]
    return out.reshape(requests * count, -1)


def _pad(x: Tensor, rows: int, width: int) -> Tensor:
    """Pad `x` `[..., N, D]` by `rows` rows and to `width` columns. SDPA's CPU kernel needs the same
    number of columns in queries, keys and values."""
    columns = width - x.shape[-1]
    return F.pad(x, (0, columns, 0, rows)) if rows or columns else x


def _attend_padded(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, sinks: Tensor | None
) -> Tensor:
    """Softmax attention, `[R, G, N, D]`.

    `sinks` `[G, N]` are added to the softmax afterwards, through the logarithm of its sum, which
    SDPA's CPU kernel returns if it is called by its own name.
    """
    if sinks is None:
        return F.scaled_dot_product_attention(q, k, v, mask, scale=scale)
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, log_sum = flash(q, k, v, attn_mask=mask, scale=scale)
    return out * sigmoid(log_sum - sinks)[..., None].to(out.dtype)


def sigmoid(x: Tensor) -> Tensor:
    """`torch.sigmoid` whose result for an element does not depend on its place. torch computes the
    last few elements of a tensor one by one, with other rounding."""
    count = x.numel()
    return F.pad(x.flatten(), (0, -count % WHOLE)).sigmoid()[:count].view_as(x)


class CpuKVPool(MHATokenToKVPool):
    """SGLang's MHA pool, whose writes and moves are indexing instead of Triton kernels."""

    def _init_kv_copy_and_warmup(self) -> None:
        self._kv_copy_config = None

    def _move_kv_cache_impl(self, tgt_loc: Tensor, src_loc: Tensor) -> None:
        move_kv_cache_native(self.k_buffer, self.v_buffer, tgt_loc, src_loc)

    def _store_kv_layer(
        self, layer_idx: int, loc: Tensor, cache_k: Tensor, cache_v: Tensor
    ) -> None:
        self.k_buffer[layer_idx].index_copy_(0, loc, cache_k)
        self.v_buffer[layer_idx].index_copy_(0, loc, cache_v)


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
