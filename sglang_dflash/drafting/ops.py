"""The drafter's fused operations, as torch computes them.

`dflash_kernels.draft_ops` has them as Triton kernels. A draft network is built with one or the
other (`DraftModel`), so nothing asks for a device later.

Letters in shapes: N tokens, R requests, B block positions, C table columns, L layers, H query
heads, G kv heads, D head dim, E hidden size, I width of the MLP.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sglang_dflash.checkpoint.draft_config import Reach
from sglang_dflash.drafting.acceptance import accept
from sglang_dflash.drafting.attention.table import ContextTable, RequestSlots, fill_context_table
from sglang_dflash.drafting.draft_source import choose_source, learn_source
from sglang_dflash.drafting.kv import Tags, store_
from sglang_dflash.drafting.noise import PLAIN, BlockNoise, LogitScale, SampleFilters
from sglang_dflash.drafting.rope import Rotary, rotate
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

    def context_table(
        self, requests: RequestSlots, reach: Reach, tags: Tags | None
    ) -> ContextTable:
        """Find the entries that each request reads, and mark in `tags` that they are in use."""
        req_to_token, rows, seq_lens, _ = requests
        shape = len(rows), requests.columns(reach)
        entries = torch.empty(shape, dtype=torch.int32, device=rows.device)
        fill_context_table(entries, req_to_token, rows, seq_lens, reach, tags)
        return ContextTable(entries, seq_lens)

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
        hidden: Tensor,
        bonus: Tensor,
        predecessors: Tensor,
        successors: Tensor,
        noise: BlockNoise | None = None,
    ) -> Tensor:
        """Take a candidate of each position, the one with the largest of `candidate_scores` after
        the one taken before.

        Args:
            logits: float32 `[R, P, K]`, of the candidates.
            ids: int64 `[R, P, K]`, their tokens.
            hidden: `[R, P, r]`, projected.
            bonus: int64 `[R]`, the tokens before the first position.
            predecessors, successors: `[V, r]`.
            noise: makes of these scores those of `BlockNoise.scores`.

        Returns:
            Tokens int64, -1 where the score is not finite: `[R, P]` without noise, and with it
            `[2, R, P]`, of a walk by each of `noise.RULES`.
        """
        walks = []
        for walk_noise in (None,) if noise is None else (None, noise):
            taken, before = [], bonus
            for place in range(ids.shape[1]):
                inputs = logits[:, place], ids[:, place], hidden[:, place], before
                scores = candidate_scores(*inputs, predecessors, successors)
                if walk_noise is not None:
                    at = ids[:, place, None]
                    scores = walk_noise.scores(scores[:, None], at, first=place + 1)[:, 0]
                best, index = scores.max(-1)
                before = ids[:, place].gather(1, index[:, None])[:, 0]
                taken.append(before.where(best.isfinite(), -1))
            walks.append(torch.stack(taken, 1))
        return walks[0] if noise is None else torch.stack(walks)

    def largest(
        self,
        logits: Tensor,
        noise: BlockNoise,
        first_id: int,
        scale: LogitScale = PLAIN,
        token_ids: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The largest score of every draft by each of `noise.RULES`, and its column.

        Args:
            logits: `[N, V]`, of the P drafts of each of R requests, N = R P.
            first_id: the number of the first column.
            scale: of logits before noise is added.
            token_ids: int64, the token of each column of all ranks, which its noise is of; None if
                its number is the token.

        Returns:
            float32 `[2, N]`, +Inf or NaN if a logit is NaN; and int64 `[2, N]`.
        """
        columns = torch.arange(logits.shape[1], device=logits.device) + first_id
        ids = columns if token_ids is None else token_ids[columns]
        of_requests = logits.unflatten(0, (len(noise.seeds), -1))
        scores = noise.scores(of_requests, ids, scale=scale).flatten(0, 1)
        best, index = torch.stack((logits.float(), scores)).max(-1)
        return best, index + first_id

    def sample_filtered(self, logits: Tensor, noise: BlockNoise, filters: SampleFilters) -> Tensor:
        """Sample a token of each row from the tokens that the filters keep: the one with the
        largest logit / temperature + noise.

        Args:
            logits: `[N, V]`, of P positions of each of R requests, N = R P.
            noise: of the rows. A request without noise has a `top_ks` of 1.
            filters: of the requests. What they keep of a row depends on probabilities among all V
                tokens, in the order of their logits, and of equal ones of their ids.

        Returns:
            int64 `[N]`.
        """
        shape = len(noise.seeds), len(logits) // len(noise.seeds), -1
        by_row = (x.repeat_interleave(shape[1])[:, None] for x in (noise.temperatures, *filters))
        temperatures, top_ks, top_ps, min_ps = by_row
        values, ids = logits.sort(dim=-1, descending=True, stable=True)
        scaled = values.float() / temperatures.where(temperatures > 0, 1.0)
        probabilities = scaled.softmax(-1)
        likelier = probabilities.cumsum(-1) - probabilities
        left_out = torch.arange(logits.shape[1], device=logits.device) >= top_ks
        left_out |= (likelier > top_ps) & (top_ps < 1)
        left_out |= probabilities < probabilities[:, :1] * min_ps
        scores = noise.scores(values.view(shape), ids.view(shape)).flatten(0, 1)
        best = scores.masked_fill(left_out, -torch.inf).argmax(-1, keepdim=True)
        return ids.gather(1, best)[:, 0]


def candidate_scores(
    logits: Tensor,
    ids: Tensor,
    hidden: Tensor,
    before: Tensor,
    predecessors: Tensor,
    successors: Tensor,
) -> Tensor:
    """Each candidate's logit + <predecessors[token before] * hidden, successors[candidate]>,
    float32 `[..., K]`.

    Args:
        logits: float32 `[..., K]`.
        ids: int64 `[..., K]`, the candidates.
        hidden: `[..., r]`.
        before: int64 `[...]`.
        predecessors, successors: `[V, r]`.
    """
    query = predecessors[before] * hidden
    return logits + (query[..., None, :] * successors[ids]).sum(-1, dtype=torch.float32)


def norm_rope_context(
    kv: Tensor, positions: Tensor, k_weights: Tensor, rotary: Rotary, eps: float
) -> Tensor:
    """Context K/V `[..., N, L, 2, G, D]` with RMSNorm by `k_weights` `[L, D]` and RoPE on K."""
    k, v = kv.unbind(-3)
    cos, sin = (t.unsqueeze(-3) for t in rotary.cos_sin(positions, k.dtype))
    k = F.rms_norm(k, k.shape[-1:], eps=eps) * k_weights[:, None]
    return torch.stack((rotate(k, cos, sin), v), dim=-3)
