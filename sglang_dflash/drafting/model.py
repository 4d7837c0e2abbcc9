"""The draft network of DFlash (arXiv 2602.06036, section 4): Qwen3-style layers over one block.

Letters in shapes: N tokens, R requests, B block positions, L layers, H query heads, G kv heads,
D head dim, E hidden size, F target layers that the draft reads.

The caller decides how the block attends to its context: `forward` takes an `attend` function, so
serving (a cache), training (a mask) and tests (dense attention) share the weights and arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sglang_dflash.checkpoint.draft_config import DraftConfig
from sglang_dflash.checkpoint.target_config import share_of_rank
from sglang_dflash.drafting import heads
from sglang_dflash.drafting.heads.head import Around, DraftHead, TargetHead
from sglang_dflash.drafting.ops import TorchOps, norm_rope_context
from sglang_dflash.drafting.packed import (
    Packed,
    pack,
    pack_again,
    pack_linears,
    plain_weight,
    without_bias,
)
from sglang_dflash.drafting.parallel import TensorParallel
from sglang_dflash.drafting.rope import Rotary

# (layer, q [..., N, H, D], k [..., N, G, D], v [..., N, G, D]) -> [..., N, H, D]
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


class DraftLayer(nn.Module):
    """One pre-norm transformer layer with per-head RMSNorm on q and k, and a SwiGLU MLP."""

    def __init__(self, config: DraftConfig, tp: TensorParallel, ops: TorchOps) -> None:
        """`config`: this rank's part."""
        super().__init__()
        self.tp, self.ops, self.eps = tp, ops, config.rms_norm_eps
        self.head_dim = config.head_dim
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        width, inner = config.hidden_size, config.intermediate_size
        self.input_layernorm = nn.RMSNorm(width, eps=self.eps)
        self.qkv_proj = nn.Linear(
            width, (self.heads + 2 * self.kv_heads) * self.head_dim, bias=config.attention_bias
        )
        self.q_norm = nn.RMSNorm(self.head_dim, eps=self.eps)
        self.k_norm = nn.RMSNorm(self.head_dim, eps=self.eps)
        self.o_proj = nn.Linear(self.heads * self.head_dim, width, bias=config.attention_bias)
        self.post_attention_layernorm = nn.RMSNorm(width, eps=self.eps)
        self.gate_up_proj = nn.Linear(width, 2 * inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None,
        rotation: Any,
        attend: Callable[[Tensor, Tensor, Tensor], Tensor],
        around: tuple[Around, Around],
    ) -> tuple[Tensor, Tensor]:
        """Run the layer on residual + x, each `[..., N, E]`: the N tokens of a block.

        Args:
            residual: None for the first layer.
            rotation: from `TorchOps.rotation`.
            attend: `Attend` of this layer.
            around: what the head puts around attention and around the MLP.

        Returns:
            The MLP's output and the residual that it is to be added to, `[..., N, E]`.
        """
        ops, norm = self.ops, self.input_layernorm
        x, residual = ops.add_rms_norm(x, residual, norm.weight, self.eps)
        x, finish = around[0](x)
        q, k, v = ops.qk_norm_rope(
            self.qkv_proj(x), self.q_norm.weight, self.k_norm.weight, rotation, self.heads, self.eps
        )
        # Every rank holds the whole bias, so it is added after the sum.
        x = self.tp.all_reduce(without_bias(self.o_proj, attend(q, k, v).flatten(-2)))
        x, bias = finish(x, self.o_proj.bias)
        norm = self.post_attention_layernorm
        x, residual = ops.add_rms_norm(x, residual, norm.weight, self.eps, bias)
        x, finish = around[1](x)
        x = self.tp.all_reduce(self.down_proj(ops.silu_mul(self.gate_up_proj(x))))
        return finish(x, None)[0], residual


class DraftModel(nn.Module):
    """The draft network without an embedding, which it borrows from the target.

    Args:
        ops: its fused operations; None for torch's.

    Attributes:
        lm_head: this rank's rows of its own; None if it borrows the target's.
        head: the weights of its head beside the lm_head.
        token_ids: int64 `[V]`, the tokens of all rows of its own lm_head, ascending.

    Raises:
        ConfigError: the size of `tp` does not divide the config's heads or FFN width.
    """

    def __init__(
        self, config: DraftConfig, tp: TensorParallel | None = None, ops: TorchOps | None = None
    ) -> None:
        super().__init__()
        self.config, self.tp = config, tp or TensorParallel()
        self.ops: TorchOps = ops or TorchOps()
        self.fc = nn.Linear(config.target_hidden_width, config.hidden_size, bias=False)
        self.hidden_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        part = config.of_rank(self.tp.size)
        self.layers = nn.ModuleList(
            DraftLayer(part, self.tp, self.ops) for _ in range(config.num_hidden_layers)
        )
        # Of one token's K/V on this rank, `(L, 2, G, D)`.
        self.kv_shape = part.kv_shape
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary = Rotary(config.rope, config.head_dim, config.max_position_embeddings)
        rows = config.draft_vocab_size
        self.lm_head = None
        if rows is not None:
            rows = share_of_rank("draft's draft_vocab_size", rows, self.tp.size)
            self.lm_head = nn.Linear(config.hidden_size, rows, bias=False)
        self.head = heads.HEAD_MODULES[type(config.head)](config, self.tp, self.ops)
        # Not of a state dict: a checkpoint has integers that give it.
        self.token_ids: Tensor | None
        self.register_buffer("token_ids", None, persistent=False)
        # By `freeze`: the context projection's weight and bias, and the k_norms, of all layers.
        self._joined: tuple[Tensor, Tensor | None, Tensor] | None = None
        # By `pack`: that weight, in place of the plain one.
        self._packed_context: Packed | None = None
        self._float16 = False

    @property
    def device(self) -> torch.device:
        return self.norm.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.norm.weight.dtype

    def context_features(self, target_hidden: Tensor) -> Tensor:
        """Return the features from which all layers project the context's K and V.

        Args:
            target_hidden: `[..., N, F * E]`, outputs of the config's `target_layer_ids`, joined.

        Returns:
            `[..., N, E]` in the dtype of the weights.
        """
        context = self.fc(target_hidden.to(self.dtype))
        weight, eps = self.hidden_norm.weight, self.config.rms_norm_eps
        return self.ops.add_rms_norm(context, None, weight, eps)[0]

    def project_context(self, features: Tensor) -> Tensor:
        """Every layer's context K and V of tokens, before norm and RoPE.

        Args:
            features: `[..., N, E]`, from `context_features`.

        Returns:
            `[..., N, L, 2, G, D]` in the dtype of the weights.
        """
        if self._packed_context is not None:
            kv = self._packed_context(features, self._context_projection()[1])
        else:
            kv = F.linear(features, *self._context_projection())
        return kv.unflatten(-1, self.kv_shape)

    def context_kv(self, target_hidden: Tensor, positions: Tensor) -> Tensor:
        """Every layer's context K (normed and rotated) and V, for a caller with a cache of its own.

        Args:
            target_hidden: see `context_features`.
            positions: int `[..., N]`.

        Returns:
            `[..., N, L, 2, G, D]` in the dtype of the weights.
        """
        return norm_rope_context(
            self.project_context(self.context_features(target_hidden)),
            positions,
            self._k_norms(),
            self.rotary,
            self.config.rms_norm_eps,
        )

    def write_context(
        self, kv: Tensor, layers: slice, positions: Tensor, cache: Tensor, entries: Tensor
    ) -> None:
        """Store `context_kv` of N tokens in entries of a draft KV cache, see
        `TorchOps.write_context`.

        Args:
            layers: the l layers that `kv` `[N, l, 2, G, D]` and `cache` `[S, l, 2, G, D]` are of.
        """
        self.ops.write_context(
            cache,
            kv,
            entries,
            positions,
            self._k_norms()[layers],
            self.rotary,
            self.config.rms_norm_eps,
        )

    def forward(self, embeddings: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Run all layers and the final norm.

        Args:
            embeddings: `[..., N, E]`, of the N tokens of a block. May be overwritten.
            positions: int64 `[..., N]`.
            attend: attention of each layer over the context and the block.

        Returns:
            Hidden states `[..., N, E]`.
        """
        rotation = self.ops.rotation(self.rotary, positions, embeddings.dtype)
        x, residual = embeddings, None
        for i, layer in enumerate(self._each_layer()):
            own_attend, around = partial(attend, i), self.head.around(i)
            x, residual = layer(x, residual, rotation, own_attend, around)
        eps = self.config.rms_norm_eps
        return self.ops.add_rms_norm(x, residual, self.norm.weight, eps, needs_sum=False)[0]

    def make_head(self, target: TargetHead) -> DraftHead:
        """The head over the target's embedding and lm_head, or the draft's own lm_head."""
        if self.lm_head is not None:
            first_id = self.tp.rank * self.lm_head.out_features
            target = TargetHead(target.embed, self.lm_head, first_id, self.token_ids)
        return self.head.over(target)

    def freeze(self) -> DraftModel:
        """Prepare for inference, in place: no gradients, all layers' K/V projections in one matrix.

        Weights that change afterwards have no effect on context K/V until `join_again`.
        """
        self.requires_grad_(False).eval()
        self._joined = (*self._context_projection(), self._k_norms())
        return self

    def join_again(self) -> None:
        """Rebuild what `freeze` and `pack` have made of the weights after these have changed in
        place, in the memory that recorded steps read."""
        if self._joined is None:
            return
        weight, bias, norms = self._joined
        packed = self._packed_context
        weight = weight if packed is None else packed.unpacked()
        for i, layer in enumerate(self._each_layer()):
            qkv, first = layer.qkv_proj, layer.heads * self.config.head_dim
            norms[i].copy_(layer.k_norm.weight)
            for joined, part in ((weight, plain_weight(qkv)), (bias, qkv.bias)):
                if joined is not None and part is not None:
                    rows = len(part) - first
                    joined[i * rows : (i + 1) * rows].copy_(part[first:])
        if packed is not None:
            self._packed_context = pack_again(weight, self._float16)

    def pack(self, float16: bool = False) -> None:
        """Pack the weights of a frozen network on a CPU, in place (`packed.pack`)."""
        weight, bias = self._context_projection()
        self._packed_context = pack(weight, float16)
        if self._packed_context is not None:
            self._joined = (weight[:0], bias, self._k_norms())
        self._float16 = float16
        pack_linears(self, float16)

    def _context_projection(self) -> tuple[Tensor, Tensor | None]:
        """Weight `[L * 2 G D, E]` and bias `[L * 2 G D]` of all layers' K and V projections."""
        if self._joined is not None:
            return self._joined[:2]
        projections = [layer.qkv_proj for layer in self._each_layer()]
        rows = slice(self._each_layer()[0].heads * self.config.head_dim, None)
        biases = [p.bias[rows] for p in projections if p.bias is not None]
        weight = torch.cat([p.weight[rows] for p in projections])
        return weight, torch.cat(biases) if biases else None

    def _k_norms(self) -> Tensor:
        """All layers' k_norm weights, `[L, D]`."""
        if self._joined is not None:
            return self._joined[2]
        return torch.stack([layer.k_norm.weight for layer in self._each_layer()])

    def _each_layer(self) -> list[DraftLayer]:
        return cast("list[DraftLayer]", list(self.layers))
