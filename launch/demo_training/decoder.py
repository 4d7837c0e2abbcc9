"""Fast batched decoding of a small Qwen3 target on a CPU, with the hidden states that drafts read.

Transformers' generate spends most of its time outside the matrix products for a model this small.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from sglang_dflash.drafting.model import DraftLayer
from sglang_dflash.drafting.ops import TorchOps
from sglang_dflash.drafting.parallel import TensorParallel
from sglang_dflash.drafting.rope import Rotary
from sglang_dflash.facts.draft_config import DraftConfig, LayerAttention
from sglang_dflash.facts.rope_config import RopeConfig
from sglang_dflash.facts.tensors import layout


class Decoder:
    """A Qwen3 target whose layers are those of a draft network: the architecture is the same.

    Texts of a batch have the same length. Letters in shapes: B texts, N new tokens, E hidden size,
    F layers whose outputs are kept.
    """

    def __init__(self, target: PreTrainedModel, layer_ids: Sequence[int]) -> None:
        """`layer_ids`: layers whose outputs are kept."""
        of = target.config
        self.layer_ids = tuple(layer_ids)
        self.config = _as_draft(target)
        self.embed = target.get_input_embeddings().weight.detach()
        self.layers = [
            DraftLayer(self.config, TensorParallel(), TorchOps()) for _ in self.config.layers
        ]
        weights = target.model.state_dict()
        parts_of = layout(self.config)
        for i, layer in enumerate(self.layers):
            state = {
                name: torch.cat([weights[part.name] for part in parts_of[f"layers.{i}.{name}"]])
                for name in layer.state_dict()
            }
            layer.load_state_dict(state)
            layer.requires_grad_(False)
        self.norm_weight = weights["norm.weight"]
        self.rotary = Rotary(self.config.rope, of.head_dim, of.max_position_embeddings)
        self._kv: list[tuple[Tensor, Tensor]] = []
        self.length = 0

    @torch.inference_mode()
    def start(self, ids: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
        """Forget all texts and run over new ones, `ids` `[B, N]`. Returns as `extend`.

        `capacity`: tokens per text at most.
        """
        shape = (len(ids), self.config.num_key_value_heads, capacity, self.config.head_dim)
        self._kv = [(torch.empty(shape), torch.empty(shape)) for _ in self.layers]
        self.length = 0
        return self.extend(ids)

    @torch.inference_mode()
    def extend(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Run over the next tokens `ids` `[B, N]` of every text.

        Returns:
            The outputs of `layer_ids` and the final hidden states, joined, `[B, N, (F + 1) E]`;
            the logits after the last token, `[B, V]`.
        """
        begin, self.length = self.length, self.length + ids.shape[1]
        rotation = self.rotary.cos_sin(torch.arange(begin, self.length), torch.float32)
        x, residual, kept = F.embedding(ids, self.embed), None, []
        for i, layer in enumerate(self.layers):
            x, residual = layer(
                x, residual, rotation, lambda q, k, v, i=i: self._attend(i, begin, q, k, v)
            )
            if i in self.layer_ids:
                kept.append(residual + x)
        x = F.rms_norm(residual + x, x.shape[-1:], self.norm_weight, self.config.rms_norm_eps)
        return torch.cat([*kept, x], dim=-1), x[:, -1] @ self.embed.T

    @torch.inference_mode()
    def keep(self, rows: Tensor) -> None:
        """Forget all texts but `rows` int64 `[R]`."""
        self._kv = [(k[rows], v[rows]) for k, v in self._kv]

    def _attend(self, layer: int, begin: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = self._kv[layer]
        keys[:, :, begin : self.length] = k.transpose(1, 2)
        values[:, :, begin : self.length] = v.transpose(1, 2)
        keys, values = keys[:, :, : self.length], values[:, :, : self.length]
        n, groups = q.shape[1], q.shape[2] // k.shape[2]
        if n == 1:
            q = q.unflatten(2, (-1, groups)).squeeze(1) * q.shape[-1] ** -0.5  # [B, G, g, D]
            return ((q @ keys.transpose(2, 3)).softmax(-1) @ values).flatten(1, 2).unsqueeze(1)
        mask = torch.arange(self.length) <= torch.arange(begin, self.length)[:, None]
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            keys.repeat_interleave(groups, 1),
            values.repeat_interleave(groups, 1),
            attn_mask=mask,
        )
        return out.transpose(1, 2)


def _as_draft(target: PreTrainedModel) -> DraftConfig:
    """The target's geometry in the fields that `DraftLayer` reads."""
    of = target.config
    return DraftConfig(
        hidden_size=of.hidden_size,
        intermediate_size=of.intermediate_size,
        num_hidden_layers=of.num_hidden_layers,
        num_attention_heads=of.num_attention_heads,
        num_key_value_heads=of.num_key_value_heads,
        head_dim=of.head_dim,
        vocab_size=of.vocab_size,
        rms_norm_eps=of.rms_norm_eps,
        rope=RopeConfig(theta=of.rope_parameters["rope_theta"]),
        max_position_embeddings=of.max_position_embeddings,
        block_size=1,
        mask_token_id=0,
        num_target_layers=of.num_hidden_layers,
        target_layer_ids=(0,),
        layers=(LayerAttention(None, causal=True),) * of.num_hidden_layers,
    )
