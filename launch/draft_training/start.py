"""Initial state of a draft: its config.json, and weights from the target's last layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from sglang_dflash.checkpoint.target_layers import default_target_layer_ids
from sglang_dflash.checkpoint.tensors import layout
from sglang_dflash.drafting.model import DraftModel

BLOCK_SIZE, LAYERS, FEATURES = 8, 3, 5
DFLASH2 = {
    "selector_rank": 64, "selector_top_k": 16, "conv_kernel_size": 2, "conv_group_size": 16,
}  # fmt: skip


def mask_token(tokenizer: Any, rows: int) -> int:
    """A token that no text holds: an embedding row without a token, or else the last special token
    that the chat template does not use.

    Raises:
        ValueError: there is none.
    """
    if len(tokenizer) < rows:
        return len(tokenizer)
    used = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id}
    template = tokenizer.chat_template
    for token, of in sorted(tokenizer.added_tokens_decoder.items(), reverse=True):
        if of.special and token not in used and str(of) not in template:
            return token
    raise ValueError(
        f"{tokenizer.name_or_path}: every token can occur in a text; the draft needs one more as "
        "its mask: add a special token, and a row to the target's embeddings"
    )


def draft_config(target: PreTrainedModel, tokenizer: Any, context: int) -> dict[str, Any]:
    """config.json of the v1 draft, in the published layout. Its layers are as wide as the target's,
    which they start from.

    `context`: tokens that it sees in training. It never reads from further away: that would be
    noise to it.
    """
    of = target.config.get_text_config()
    heads, layers = of.num_attention_heads, of.num_hidden_layers
    rope = getattr(of, "rope_parameters", None) or {}
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": of.hidden_size,
        "intermediate_size": of.intermediate_size,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": heads,
        "num_key_value_heads": of.num_key_value_heads,
        "head_dim": getattr(of, "head_dim", None) or of.hidden_size // heads,
        "hidden_act": "silu",
        "attention_bias": False,
        "rms_norm_eps": of.rms_norm_eps,
        "rope_theta": float(rope.get("rope_theta", 10000.0)),
        "max_position_embeddings": of.max_position_embeddings,
        "vocab_size": of.vocab_size,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "layer_types": ["sliding_attention"] * LAYERS,
        "sliding_window": context,
        # Without it, Transformers drops the window of a Qwen3 config, and vLLM refuses the draft.
        "use_sliding_window": True,
        "max_window_layers": 0,
        "is_causal": False,
        "block_size": BLOCK_SIZE,
        "num_target_layers": layers,
        "dflash_config": {
            "mask_token_id": mask_token(tokenizer, of.vocab_size),
            "target_layer_ids": list(
                default_target_layer_ids(
                    of.num_hidden_layers, min(FEATURES, of.num_hidden_layers - 3)
                )
            ),
        },
    }


def dflash2_config(first: dict[str, Any]) -> dict[str, Any]:
    """config.json of the DFlash2 draft, by that of the v1 draft."""
    own = {**first["dflash_config"], **DFLASH2}
    return {**first, "architectures": ["DFlash2DraftModel"], "dflash_config": own}


def init_from_draft(model: DraftModel, first: DraftModel) -> None:
    """Start a DFlash2 draft as the v1 draft that it computes the same as."""
    model.load_state_dict(first.state_dict(), strict=False)
    with torch.no_grad():
        for name, weight in model.head.named_parameters():
            if name.endswith("predecessor_codebook"):
                weight.normal_(0, 0.3)
            elif name.endswith("hidden_projection.weight"):
                weight.normal_(0, 0.05)
            elif name.endswith("kernel_projection.weight"):
                weight.zero_()


@torch.no_grad()
def init_from_target(model: DraftModel, target: PreTrainedModel, sample: Tensor) -> bool:
    """Copy the target's last layers into the draft's, and pass its last feature through `fc`.

    Args:
        sample: token ids `[1, N]` of a text, by which norms of q and k begin that the target does
            not have.

    Returns:
        Whether the target's layers have what a draft's have. If not, nothing is changed.
    """
    decoder = target.get_decoder()
    weights = {f"layers.{name}": w.float() for name, w in decoder.layers.state_dict().items()}
    first = len(decoder.layers) - len(model.layers)
    sizes = _sizes_of_q_and_k(target, first, sample)
    states = []
    for i, layer in enumerate(model.layers):
        parts, own, of = layout(model.config), f"layers.{i}.", f"layers.{first + i}."
        state = dict(layer.state_dict())
        for name in state:
            named = [part.name.replace(own, of) for part in parts[own + name]]
            if all(n in weights for n in named):
                state[name] = torch.cat([weights[n] for n in named])
            elif name in ("q_norm.weight", "k_norm.weight") and first + i in sizes:
                state[name] = torch.full_like(state[name], sizes[first + i][name[0]])
            else:
                return False
        if any(state[n].shape != p.shape for n, p in layer.state_dict().items()):
            return False
        # Context K/V pass no norm of the layer: its weight goes into the projection.
        state["qkv_proj.weight"] = state["qkv_proj.weight"] * state["input_layernorm.weight"]
        state["input_layernorm.weight"] = torch.ones_like(state["input_layernorm.weight"])
        states.append(state)
    for layer, state in zip(model.layers, states, strict=True):
        layer.load_state_dict(state)
    model.norm.weight.copy_(decoder.norm.weight)
    width = model.config.hidden_size
    model.fc.weight.normal_(0, 0.02)
    model.fc.weight[:, -width:] += torch.eye(width)
    return True


def _sizes_of_q_and_k(
    target: PreTrainedModel, first: int, sample: Tensor
) -> dict[int, dict[str, float]]:
    """Root mean squares of q and k of the layers from `first` on, where there are such."""
    found: dict[int, dict[str, float]] = {}
    handles = []
    for i, layer in list(enumerate(target.get_decoder().layers))[first:]:
        for name in ("q_proj", "k_proj"):
            module = getattr(getattr(layer, "self_attn", None), name, None)
            if module is None:
                continue

            def note(_m: Any, _args: Any, out: Tensor, i: int = i, name: str = name[0]) -> None:
                found.setdefault(i, {})[name] = out.float().square().mean().sqrt().item()

            handles.append(module.register_forward_hook(note))
    target.get_decoder()(input_ids=sample.to(target.device), use_cache=False)
    for handle in handles:
        handle.remove()
    return found
