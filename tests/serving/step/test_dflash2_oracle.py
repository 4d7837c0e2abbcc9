"""DFlash2 drafts by our drafter and by SGLang's modules: the same weights and hidden states of the
target give the same hidden states and tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from sglang.srt.models import dflash as sglang_dflash_models
from sglang.srt.runtime_context import get_parallel
from torch import Tensor
from transformers import Qwen3Config

from sglang_dflash.drafting.attention.table import RequestSlots
from sglang_dflash.drafting.drafter import Drafter
from sglang_dflash.drafting.heads.head import TargetHead
from sglang_dflash.drafting.noise import likeliest
from sglang_dflash.drafting.options import Options
from sglang_dflash.drafting.weights import load_model, read_tensors, save_model
from tests.conftest import kv_groups, random_model, raw_config

LENGTH, BONUS = 21, 7


def raw_of(conv: tuple[int, int], selector: tuple[int, int], **changes: Any) -> dict[str, Any]:
    own = {
        "mask_token_id": 63,
        "target_layer_ids": [1, 3],
        **dict(zip(("conv_kernel_size", "conv_group_size"), conv, strict=True)),
        **dict(zip(("selector_rank", "selector_top_k"), selector, strict=True)),
    }
    named = {"architectures": ["DFlash2DraftModel"], "dflash_config": own}
    return raw_config(**named) | changes


# Without the flag, Transformers drops the window.
SLIDING = {
    "layer_types": 3 * ["sliding_attention"], "sliding_window": 12, "use_sliding_window": True
}  # fmt: skip
CASES = {
    # As for Qwen3.5: five features of a deep target, more query heads per KV head.
    "hybrid target": raw_of(
        (2, 8), (16, 8), num_key_value_heads=1, num_target_layers=12,
        hidden_size=64, block_size=8,
    ),
    "sliding layers only": raw_of((3, 16), (8, 4), **SLIDING),
    "a block of six": raw_of((4, 4), (8, 16), block_size=6),
}  # fmt: skip
CASES["hybrid target"]["dflash_config"]["target_layer_ids"] = [1, 3, 5, 7, 9]
# SGLang reads it there only.
CASES["a block of six"]["dflash_config"]["output_multiplier"] = 0.5


class Dense(torch.nn.Module):
    """Stand-in for `RadixAttention`: attends to the context's K/V and the block's, by a mask."""

    def __init__(self, k: Tensor, v: Tensor, of: Any) -> None:
        super().__init__()
        self.k, self.v, self.of = k, v, of

    def forward(self, q: Tensor, k: Tensor, v: Tensor, _batch: None) -> Tensor:
        dim, block = self.of.head_dim, len(q)
        q, keys, values = (
            t.view(len(t), -1, dim).transpose(0, 1)
            for t in (q, torch.cat((self.k, k)), torch.cat((self.v, v)))
        )
        at, of = torch.arange(LENGTH, LENGTH + block)[:, None], torch.arange(LENGTH + block)
        seen = torch.ones(block, LENGTH + block, dtype=torch.bool)
        if self.of.sliding_window_size > 0:
            # SGLang's number is of the tokens before the query, and such layers are causal.
            seen = (at - of <= self.of.sliding_window_size) & (of <= at)
        out = torch.nn.functional.scaled_dot_product_attention(
            q, keys, values, attn_mask=seen, enable_gqa=True
        )
        return out.transpose(0, 1).flatten(1)


def by_sglang(
    raw: dict[str, Any], tensors: dict[str, Tensor], embed: Tensor, hidden: Tensor
) -> Any:
    """Hidden states `[B, E]`, the lattice of scores, and the greedy tokens."""
    known = {name: value for name, value in raw.items() if name not in ("architectures", "dtype")}
    with get_parallel().override(tp_size=1, tp_rank=0, tp_group=None):
        model: Any = sglang_dflash_models.DFlash2DraftModel(Qwen3Config(**known))
        model.load_weights(tensors.items())
        context, positions = model.project_target_hidden(hidden), torch.arange(LENGTH)
        for layer in model.layers:
            k, v = layer.self_attn.kv_proj_only(context)
            k = layer.self_attn.apply_k_rope(positions, layer.self_attn.apply_k_norm(k))
            layer.self_attn.attn = Dense(k, v, layer.self_attn)
        block = raw["block_size"]
        ids = torch.full((block,), raw["dflash_config"]["mask_token_id"])
        ids[0] = BONUS
        places = torch.arange(LENGTH, LENGTH + block)
        states = model(ids, places, None, input_embeds=embed[ids]).hidden_states
    selector, drafts = model.candidate_selector, states[None, 1:]
    values, candidates = (drafts @ embed.T).topk(selector.top_k)
    scores = selector.build_lattice(
        candidate_ids=candidates,
        unary_logits=model._transform_unary_logits(values),
        hidden_states=drafts,
        anchor_token_ids=torch.tensor([BONUS]),
    )
    tokens, _ = selector.sample_path(
        candidate_ids=candidates, scores=scores, uniforms=torch.zeros(1, block - 1),
        temperatures=torch.ones(1), greedy_mask=torch.ones(1, dtype=torch.bool),
    )  # fmt: skip
    return states, tokens[0].tolist()


@pytest.mark.parametrize("name", CASES)
def test_hidden_states_and_tokens_are_sglangs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Compiling its functions would take most of the time.
    for function in ("_grouped_conv", "_score_edges", "_follow_maps"):
        compiled = getattr(sglang_dflash_models, function)
        eager = getattr(compiled, "__wrapped__", compiled)
        monkeypatch.setattr(sglang_dflash_models, function, eager)
    torch.manual_seed(0)
    raw = CASES[name]
    drawn: Any = random_model(raw)
    drawn.head.candidate_selector.hidden_projection.weight.data *= 5
    save_model(drawn, raw, tmp_path, torch.float32)
    model, tensors = load_model(tmp_path, dtype=torch.float32), read_tensors(tmp_path)
    embed = torch.randn(64, raw["hidden_size"])
    hidden = torch.randn(LENGTH, model.config.target_hidden_width)
    options = Options().resolve(model.config)
    drafter = Drafter(
        model,
        TargetHead(lambda ids: embed[ids], lambda states: states @ embed.T),
        kv_groups(model, options, LENGTH + 1),
        options,
    )
    slots = torch.arange(1, LENGTH + 1)
    with torch.inference_mode():
        states, tokens = by_sglang(raw, tensors, embed, hidden)
        drafter.absorb(hidden, torch.arange(LENGTH), slots)
        requests = RequestSlots(
            slots[None].int(), torch.tensor([0]), torch.tensor([LENGTH]), LENGTH
        )
        bonus = torch.tensor([BONUS])
        own = drafter.forward(bonus, requests)[0]
        drafted = likeliest(drafter.propose(bonus, requests))[0, 1:].tolist()
    # Float32 sums in another order: 1.5e-5 with AVX-512, of states of about 1.
    torch.testing.assert_close(own, states, atol=3e-5, rtol=1e-5)
    assert drafted == tokens
    # A selector that takes the likeliest candidate everywhere would show nothing.
    assert drafted != (own[1:] @ embed.T).argmax(-1).tolist()
