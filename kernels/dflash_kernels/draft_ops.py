"""`sglang_dflash.drafting.ops.TorchOps` as Triton kernels. Letters in shapes as there."""

from __future__ import annotations

import torch
from torch import Tensor

from dflash_kernels.accept import accept
from dflash_kernels.add_rms_norm import add_rms_norm
from dflash_kernels.candidates import candidates
from dflash_kernels.context_table import context_table
from dflash_kernels.convolve import convolve
from dflash_kernels.draft_source import choose_source, learn_source
from dflash_kernels.penalize import penalize
from dflash_kernels.place import place_in_ring
from dflash_kernels.prepare_block import prepare_block
from dflash_kernels.qk_norm_rope import qk_norm_rope, write_context
from dflash_kernels.sample_filtered import sample_filtered
from dflash_kernels.sample_whole import sample_whole
from dflash_kernels.silu_mul import silu_mul
from dflash_kernels.text_match import find_match
from dflash_kernels.walk import walk
from sglang_dflash.drafting.acceptance import Accepted
from sglang_dflash.drafting.noise import (
    RULES,
    BlockNoise,
    Proposal,
    SampleFilters,
)
from sglang_dflash.drafting.ops import Edges, TorchOps
from sglang_dflash.drafting.rope import Rotary


class TritonOps(TorchOps):
    """`TorchOps` in a launch or two each, for inference. Inputs are overwritten."""

    write_context = staticmethod(write_context)
    find_match = staticmethod(find_match)
    choose_source = staticmethod(choose_source)
    learn_source = staticmethod(learn_source)
    place_in_ring = staticmethod(place_in_ring)
    penalize = staticmethod(penalize)
    fill_context_table = staticmethod(context_table)

    def prepare_block(
        self, bonus: Tensor, seq_lens: Tensor, block: int, mask_id: int
    ) -> tuple[Tensor, Tensor]:
        shape = len(bonus), block
        ids = torch.empty(shape, dtype=torch.int64, device=bonus.device)
        positions = torch.empty_like(ids)
        prepare_block(ids, positions, bonus, seq_lens, mask_id)
        return ids, positions

    def rotation(
        self, rotary: Rotary, positions: Tensor, dtype: torch.dtype
    ) -> tuple[Rotary, Tensor]:
        del dtype
        return rotary, positions.flatten()

    def add_rms_norm(
        self,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor,
        eps: float,
        bias: Tensor | None = None,
        needs_sum: bool = True,
    ) -> tuple[Tensor, Tensor]:
        if residual is None and bias is not None:
            raise ValueError("bias: without a residual, the sum would not be stored")
        out = torch.empty_like(x) if residual is None else x
        sums = None if residual is None else _rows(residual)
        add_rms_norm(_rows(out), _rows(x), sums, weight, eps, bias, needs_sum)
        return out, x if residual is None else residual

    def qk_norm_rope(
        self,
        qkv: Tensor,
        q_weight: Tensor,
        k_weight: Tensor,
        rotation: tuple[Rotary, Tensor],
        heads: int,
        eps: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        rotary, positions = rotation
        qk_norm_rope(_rows(qkv), positions, q_weight, k_weight, rotary, heads, eps)
        per_head = qkv.unflatten(-1, (-1, len(q_weight)))
        kv_heads = (per_head.shape[-2] - heads) // 2
        q, k, v = per_head.split((heads, kv_heads, kv_heads), dim=-2)
        return q, k, v

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        shape = *gate_up.shape[:-1], gate_up.shape[-1] // 2
        out = torch.empty(shape, dtype=gate_up.dtype, device=gate_up.device)
        silu_mul(_rows(out), _rows(gate_up))
        return out

    def convolve(
        self, x: Tensor, base: Tensor, dynamic: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        out = torch.empty_like(x)
        convolve(out, x, bias, base, dynamic)
        return out

    def candidates(self, logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
        values = logits.new_empty(len(logits), k)
        columns = torch.empty(values.shape, dtype=torch.int64, device=logits.device)
        candidates(values, columns, logits)
        return values, columns

    def walk(
        self,
        logits: Tensor,
        ids: Tensor,
        bonus: Tensor,
        edges: Edges | None,
        noise: BlockNoise | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        shape = ids.shape[:2] if noise is None else (len(RULES), *ids.shape[:2])
        out = torch.empty(shape, dtype=torch.int64, device=ids.device)
        scores = None if noise is None else torch.empty_like(logits)
        walk(out, scores, logits, ids, bonus, edges, noise)
        return out, scores

    def sample(
        self,
        logits: Tensor,
        noise: BlockNoise,
        filters: SampleFilters | None,
        proposal: Proposal | None = None,
    ) -> Tensor:
        tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
        if filters is None:
            sample_whole(tokens, logits, noise, proposal)
        else:
            sample_filtered(tokens, logits, noise, filters, proposal)
        return tokens

    def accept(self, block: Tensor, target_tokens: Tensor) -> Accepted:
        lengths, bonus = torch.empty(2, len(block), dtype=torch.int64, device=block.device)
        accept(lengths, bonus, block, target_tokens)
        return Accepted(lengths, target_tokens, bonus)


def _rows(x: Tensor) -> Tensor:
    """`[..., E]` as `[N, E]`, without a copy."""
    return x.view(-1, x.shape[-1])
