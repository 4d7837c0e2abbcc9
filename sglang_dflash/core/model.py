"""The draft network of DFlash (arXiv 2602.06036, section 4): Qwen3-style layers over one block.

Letters in shapes: N tokens, R requests, B block positions, L layers, H query heads, G kv heads,
D head dim, E hidden size, F target layers that the draft reads.

The caller decides how the block attends to its context: `forward` takes an `attend` function, so
serving (a cache), training (a mask) and tests (dense attention) share the weights and arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sglang_dflash.checkpoint.draft_config import DraftConfig
from sglang_dflash.core.parallel import TensorParallel
from sglang_dflash.core.rope import Rotary, rotate

# (layer, q [..., N, H, D], k [..., N, G, D], v [..., N, G, D]) -> [..., N, H, D]
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


class DraftLayer(nn.Module):
    """One pre-norm transformer layer with per-head RMSNorm on q and k, and a SwiGLU MLP."""

    def __init__(self, config: DraftConfig, tp: TensorParallel) -> None:
        super().__init__()
        self.tp, self.eps, self.head_dim = tp, config.rms_norm_eps, config.head_dim
        self.heads = tp.shard_size("num_attention_heads", config.num_attention_heads)
        self.kv_heads = tp.shard_size_or_replica("num_key_value_heads", config.num_key_value_heads)
        inner = tp.shard_size("intermediate_size", config.intermediate_size)
        width = config.hidden_size
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
        cos: Tensor,
        sin: Tensor,
        attend: Callable[[Tensor, Tensor, Tensor], Tensor],
    ) -> Tensor:
        """Run the layer on x `[..., N, E]`.

        Args:
            cos, sin: `[..., N, 1, D]`, from `Rotary.cos_sin`.
            attend: `Attend` of this layer.

        Returns:
            `[..., N, E]`.
        """
        qkv = self.qkv_proj(self.input_layernorm(x)).unflatten(-1, (-1, self.head_dim))
        q, k, v = qkv.split((self.heads, self.kv_heads, self.kv_heads), dim=-2)
        q, k = rotate(self.q_norm(q), cos, sin), rotate(self.k_norm(k), cos, sin)
        # Every rank holds the whole bias, so it is added after the sum.
        attended = self.tp.all_reduce(F.linear(attend(q, k, v).flatten(-2), self.o_proj.weight))
        x = x + (attended if self.o_proj.bias is None else attended + self.o_proj.bias)
        gate, up = self.gate_up_proj(self.post_attention_layernorm(x)).chunk(2, dim=-1)
        return x + self.tp.all_reduce(self.down_proj(F.silu(gate) * up))


class DraftModel(nn.Module):
    """The draft network without embedding and lm_head, which it borrows from the target.

    Raises:
        ConfigError: the size of `tp` does not divide the config's heads or FFN width.
    """

    def __init__(self, config: DraftConfig, tp: TensorParallel | None = None) -> None:
        super().__init__()
        self.config, self.tp = config, tp or TensorParallel()
        self.fc = nn.Linear(config.target_hidden_width, config.hidden_size, bias=False)
        self.hidden_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList(
            DraftLayer(config, self.tp) for _ in range(config.num_hidden_layers)
        )
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary = Rotary(config.rope, config.head_dim, config.max_position_embeddings)

    @property
    def kv_heads(self) -> int:
        """KV heads on this rank."""
        return self._each_layer()[0].kv_heads

    @property
    def kv_shape(self) -> tuple[int, int, int, int]:
        """Shape of one token's K/V on this rank: `(L, 2, G, D)`."""
        return (len(self.layers), 2, self.kv_heads, self.config.head_dim)

    def context_kv(self, target_hidden: Tensor, positions: Tensor) -> Tensor:
        """Project the target's hidden states to every layer's context K (normed and rotated) and V.

        Args:
            target_hidden: `[..., N, F * E]`, outputs of the config's `target_layer_ids`, joined.
            positions: int `[..., N]`.

        Returns:
            `[..., N, L, 2, G, D]` in the dtype of the weights.
        """
        context = self.hidden_norm(self.fc(target_hidden.to(self.fc.weight.dtype)))
        weight, bias = self._context_projection()
        kv = F.linear(context, weight, bias).unflatten(
            -1, (len(self.layers), 2, self.kv_heads, self.config.head_dim)
        )
        k, v = kv.unbind(-3)
        cos, sin = (t.unsqueeze(-3) for t in self.rotary.cos_sin(positions, k.dtype))
        k = F.rms_norm(k, (self.config.head_dim,), eps=self.config.rms_norm_eps) * self._k_norms()
        return torch.stack((rotate(k, cos, sin), v), dim=-3)

    def forward(self, embeddings: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Run all layers and the final norm.

        Args:
            embeddings: `[..., N, E]`.
            positions: int `[..., N]`.
            attend: attention of each layer over the context and the block.

        Returns:
            Hidden states `[..., N, E]`.
        """
        cos, sin = self.rotary.cos_sin(positions, embeddings.dtype)
        x = embeddings
        for i, layer in enumerate(self.layers):
            x = layer(x, cos, sin, lambda q, k, v, i=i: attend(i, q, k, v))
        return self.norm(x)

    def freeze(self) -> DraftModel:
        """Prepare for inference, in place: no gradients, all layers' K/V projections in one matrix.

        Weights that change afterwards have no effect on `context_kv`.
        """
        self.requires_grad_(False).eval()
        weight, bias = self._context_projection()
        self._joined = (
            weight.contiguous(),
            None if bias is None else bias.contiguous(),
            self._k_norms().contiguous(),
        )
        return self

    _joined: tuple[Tensor, Tensor | None, Tensor] | None = None

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
        """All layers' k_norm weights, `[L, 1, D]`."""
        if self._joined is not None:
            return self._joined[2]
        return torch.stack([layer.k_norm.weight for layer in self._each_layer()])[:, None]

    def _each_layer(self) -> list[DraftLayer]:
        return cast("list[DraftLayer]", list(self.layers))
