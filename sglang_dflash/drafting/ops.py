"""The drafter's fused operations, as torch computes them.

`dflash_kernels.draft_ops` has them as Triton kernels. A draft network is built with one or the
other (`DraftModel`), so nothing asks for a device later.

Letters in shapes: N tokens, R requests, B block positions, C table columns, L layers, H query
heads, G kv heads, D head dim, E hidden size, I width of the MLP.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sglang_dflash.checkpoint.draft_config import Reach
from sglang_dflash.drafting.acceptance import accept
from sglang_dflash.drafting.attention.table import ContextTable, RequestSlots, fill_context_table
from sglang_dflash.drafting.draft_source import choose_source, learn_source
from sglang_dflash.drafting.kv import Tags, store_
from sglang_dflash.drafting.kv.place import place_in_ring
from sglang_dflash.drafting.noise import BlockNoise
from sglang_dflash.drafting.penalties import penalize
from sglang_dflash.drafting.rope import Rotary, rotate
from sglang_dflash.drafting.target_samples import sample
from sglang_dflash.drafting.text_match import find_match

# Columns that `TorchOps.candidates` sorts together.
CHUNK = 64


class TorchOps:
    """The operations of a drafter's step between its matrix products and its attention. On any
    device, with gradients.

    A subclass may overwrite floating-point inputs unless stated otherwise.
    """

    accept = staticmethod(accept)
    find_match = staticmethod(find_match)
    choose_source = staticmethod(choose_source)
    learn_source = staticmethod(learn_source)
    place_in_ring = staticmethod(place_in_ring)
    penalize = staticmethod(penalize)
    sample = staticmethod(sample)
    fill_context_table = staticmethod(fill_context_table)

    def prepare_block(
        self, bonus: Tensor, seq_lens: Tensor, block: int, mask_id: int
    ) -> tuple[Tensor, Tensor]:
        """Ids and positions int64 `[R, B]`: the bonus token `[R]` at `seq_lens` `[R]`, then mask
        tokens."""
        ids = torch.full((len(bonus), block), mask_id, dtype=torch.int64, device=bonus.device)
        ids[:, 0] = bonus
        return ids, seq_lens[:, None] + torch.arange(block, device=bonus.device)

    def rotation(self, rotary: Rotary, positions: Tensor, dtype: torch.dtype) -> Any:
        """Return what `qk_norm_rope` needs of int64 positions `[..., N]`, once for all layers."""
        return rotary.cos_sin(positions, dtype)

    def add_rms_norm(
        self,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor,
        eps: float,
        bias: Tensor | None = None,
        needs_sum: bool = True,
    ) -> tuple[Tensor, Tensor]:
        """RMSNorm of a sum, and the sum.

        Args:
            x: `[..., N, E]`. Not overwritten if there is no residual.
            residual: `[..., N, E]`; None for none.
            weight: `[E]`.
            bias: `[E]`, of the projection that made x; None for none.
            needs_sum: whether the caller uses the sum. If not, the second result has no meaning.

        Returns:
            RMSNorm(residual + (x + bias)) * weight, and residual + (x + bias).
        """
        total = x if bias is None else x + bias
        total = total if residual is None else residual + total
        return F.rms_norm(total, weight.shape, weight, eps), total

    def qk_norm_rope(
        self, qkv: Tensor, q_weight: Tensor, k_weight: Tensor, rotation: Any, heads: int, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Split `qkv` `[..., N, (H + 2 G) D]` into q `[..., N, H, D]` and k `[..., N, G, D]`, both
        with RMSNorm by weights `[D]` and RoPE, and v `[..., N, G, D]`."""
        shape = q_weight.shape
        per_head = qkv.unflatten(-1, (-1, *shape))
        kv_heads = (per_head.shape[-2] - heads) // 2
        q, k, v = per_head.split((heads, kv_heads, kv_heads), dim=-2)
        q, k = F.rms_norm(q, shape, q_weight, eps), F.rms_norm(k, shape, k_weight, eps)
        return rotate(q, *rotation), rotate(k, *rotation), v

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up `[..., N, I]` of gate and up side by side, `[..., N, 2 I]`."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    def write_context(
        self,
        cache: Tensor,
        kv: Tensor,
        entries: Tensor,
        positions: Tensor,
        k_weights: Tensor,
        rotary: Rotary,
        eps: float,
    ) -> None:
        """Write context K, with RMSNorm and RoPE, and V of all layers into cache entries.

        Args:
            cache: `[S, L, 2, G, D]`, the entries; the last one is the spare entry
                (`DraftKVCache`). What is written is finite: see `store_`.
            kv: `[N, L, 2, G, D]`, projected K and V.
            entries: int64 `[N]`, distinct. For a token with -1, nothing but the spare entry may
                change.
            positions: int64 `[N]`.
            k_weights: `[L, D]`, of the norms.
        """
        store_(cache, entries, norm_rope_context(kv, positions, k_weights, rotary, eps))

    def convolve(
        self, x: Tensor, base: Tensor, dynamic: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        """The sum over taps t of x, t positions before, times `base[t] + dynamic[..., t, group]`.

        Args:
            x: `[..., B, E]`. What is before position 0 counts as zeros. Not overwritten.
            base: `[K, E]`, of each channel.
            dynamic: `[..., B, K, C]`, of each group of E / C channels.
            bias: `[E]`, to add to x first; None for none.

        Returns:
            `[..., B, E]`.
        """
        x = x if bias is None else x + bias
        out = torch.zeros_like(x)
        for tap, kernel in enumerate(base.unflatten(-1, (dynamic.shape[-1], -1))):
            kernel = kernel + dynamic[..., tap, :, None]
            before = F.pad(x, (0, 0, tap, 0))[..., : x.shape[-2], :]
            out = out + kernel.flatten(-2) * before
        return out

    def candidates(self, logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """The k largest of each row `[N, V]`, in descending order, and their columns int64
        `[N, k]`. Of equal ones the lower column comes first. NaN counts as the largest of all."""
        # They are in the k chunks of the largest maxima: each of those has one that is as large.
        # `topk` takes any of equal ones; the sorts are of few.
        padded = F.pad(logits, (0, -logits.shape[1] % CHUNK), value=-torch.inf)
        chunks = padded.unflatten(1, (-1, CHUNK))
        _, best = chunks.amax(-1).sort(dim=-1, descending=True, stable=True)
        best = best[:, :k].sort(-1).values
        columns = (CHUNK * best[..., None] + torch.arange(CHUNK, device=best.device)).flatten(1)
        values, places = padded.gather(1, columns).sort(dim=-1, descending=True, stable=True)
        return values[:, :k], columns.gather(1, places[:, :k])

    def walk(
        self,
        logits: Tensor,
        ids: Tensor,
        bonus: Tensor,
        edges: Edges | None,
        noise: BlockNoise | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Take a candidate of each position, the one with the largest of `candidate_scores` after
        the one taken before.

        Args:
            logits: float32 `[R, P, K]`, of the candidates.
            ids: int64 `[R, P, K]`, their tokens.
            bonus: int64 `[R]`, the tokens before the first position.
            edges: None if the scores are the logits.
            noise: makes of these scores those of `BlockNoise.scores`.

        Returns:
            Tokens int64, -1 where the score is not finite: `[R, P]` without noise, and with it
            `[2, R, P]`, of a walk by each of `noise.RULES`. And of the second walk the scores that
            its tokens were drawn by, see `noise.SampledBlocks`; None without noise.
        """
        walks, drawn_by = [], []
        for walk_noise in (None,) if noise is None else (None, noise):
            taken, before = [], bonus
            for place in range(ids.shape[1]):
                at, scores = ids[:, place], logits[:, place]
                if edges is not None:
                    of_place = edges._replace(hidden=edges.hidden[:, place])
                    scores = candidate_scores(scores, at, before, of_place)
                if walk_noise is not None:
                    drawn_by.append(walk_noise.log_weights(scores))
                    scores = walk_noise.scores(scores[:, None], at[:, None], first=place + 1)[:, 0]
                best, index = scores.max(-1)
                before = at.gather(1, index[:, None])[:, 0]
                taken.append(before.where(best.isfinite(), -1))
            walks.append(torch.stack(taken, 1))
        if noise is None:
            return walks[0], None
        return torch.stack(walks), torch.stack(drawn_by, 1)


def context_table(
    ops: TorchOps, requests: RequestSlots, reach: Reach, tags: Tags | None
) -> ContextTable:
    """Find the entries that each request reads, and mark in `tags` that they are in use."""
    req_to_token, rows, seq_lens, _ = requests
    shape = len(rows), requests.columns(reach)
    entries = torch.empty(shape, dtype=torch.int32, device=rows.device)
    ops.fill_context_table(entries, req_to_token, rows, seq_lens, reach, tags)
    return ContextTable(entries, seq_lens)


class Edges(NamedTuple):
    """The part of candidates' scores that is not their logits.

    Attributes:
        hidden: `[..., r]`, of each position, projected.
        predecessors, successors: `[V, r]`.
    """

    hidden: Tensor
    predecessors: Tensor
    successors: Tensor


def candidate_scores(logits: Tensor, ids: Tensor, before: Tensor, edges: Edges) -> Tensor:
    """Each candidate's logit + <predecessors[token before] * hidden, successors[candidate]>,
    float32 `[..., K]`.

    Args:
        logits: float32 `[..., K]`.
        ids: int64 `[..., K]`, the candidates.
        before: int64 `[...]`.
    """
    query = edges.predecessors[before] * edges.hidden
    return logits + (query[..., None, :] * edges.successors[ids]).sum(-1, dtype=torch.float32)


def norm_rope_context(
    kv: Tensor, positions: Tensor, k_weights: Tensor, rotary: Rotary, eps: float
) -> Tensor:
    """Context K/V `[..., N, L, 2, G, D]` with RMSNorm by `k_weights` `[L, D]` and RoPE on K."""
    k, v = kv.unbind(-3)
    cos, sin = (t.unsqueeze(-3) for t in rotary.cos_sin(positions, k.dtype))
    k = F.rms_norm(k, k.shape[-1:], eps=eps) * k_weights[:, None]
    return torch.stack((rotate(k, cos, sin), v), dim=-3)
