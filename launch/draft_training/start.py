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
    """Return a token that occurs in no text: an embedding row without a token, else the last
    special token that the chat template does not use.

    Raises:
        ValueError: there is no such token.
    """
    if len(tokenizer) < rows:
        return len(tokenizer)
    used = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id}
    template = tokenizer.chat_template
    for token, added_token in sorted(tokenizer.added_tokens_decoder.items(), reverse=True):
        if added_token.special and token not in used and str(added_token) not in template:
            return token
    raise ValueError(
        f"{tokenizer.name_or_path}: every token can occur in a text; the draft needs one more as "
        "its mask: add a special token, and a row to the target's embeddings"
    )


def draft_config(target: PreTrainedModel, tokenizer: Any, context: int) -> dict[str, Any]:
    """Return config.json of the v1 draft, in the published layout. Its layers have the target's
    widths, because they start from the target's weights.

    `context`: the draft's window, in training and in serving.
    """
    config = target.config.get_text_config()
    heads, layers = config.num_attention_heads, config.num_hidden_layers
    rope = getattr(config, "rope_parameters", None) or {}
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // heads,
        "hidden_act": "silu",
        "attention_bias": False,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": float(rope.get("rope_theta", 10000.0)),
        "max_position_embeddings": config.max_position_embeddings,
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "layer_types": ["sliding_attention"] * LAYERS,
        "sliding_window": context,
        # Otherwise Transformers drops the window of a Qwen3 config, and vLLM refuses the draft.
        "use_sliding_window": True,
        "max_window_layers": 0,
        "is_causal": False,
        "block_size": BLOCK_SIZE,
        "num_target_layers": layers,
        "dflash_config": {
            "mask_token_id": mask_token(tokenizer, config.vocab_size),
            "target_layer_ids": list(
                default_target_layer_ids(
                    config.num_hidden_layers, min(FEATURES, config.num_hidden_layers - 3)
                )
            ),
        },
    }


def dflash2_config(v1_config: dict[str, Any]) -> dict[str, Any]:
    """Return config.json of the DFlash2 draft, made from that of the v1 draft."""
    dflash_config = {**v1_config["dflash_config"], **DFLASH2}
    return {**v1_config, "architectures": ["DFlash2DraftModel"], "dflash_config": dflash_config}


def init_from_draft(model: DraftModel, v1_draft: DraftModel) -> None:
    """Initialize a DFlash2 draft so that it computes the same as the v1 draft."""
    model.load_state_dict(v1_draft.state_dict(), strict=False)
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
        sample: token ids `[1, N]` of a text. If the target has no norms of q and k, the draft's
            start from the size of q and k on this text.

    Returns:
        False if the target's layers lack a weight of the draft's; then nothing is changed.
    """
    decoder = target.get_decoder()
    weights = {f"layers.{name}": w.float() for name, w in decoder.layers.state_dict().items()}
    first_layer = len(decoder.layers) - len(model.layers)
    sizes = _rms_of_q_and_k(target, first_layer, sample)
    states = []
    for i, layer in enumerate(model.layers):
        parts, number = layout(model.config), first_layer + i
        draft_prefix, target_prefix = f"layers.{i}.", f"layers.{number}."
        state = dict(layer.state_dict())
        for name in state:
            joined = parts[draft_prefix + name]
            named = [part.name.replace(draft_prefix, target_prefix) for part in joined]
            if all(n in weights for n in named):
                state[name] = torch.cat([weights[n] for n in named])
            elif name in ("q_norm.weight", "k_norm.weight") and number in sizes:
                state[name] = torch.full_like(state[name], sizes[number][name[0]])
            else:
                return False
        if any(state[n].shape != p.shape for n, p in layer.state_dict().items()):
            return False
        # Context K/V bypass the layer's norm, so its weight is folded into the projection.
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


def _rms_of_q_and_k(
    target: PreTrainedModel, first_layer: int, sample: Tensor
) -> dict[int, dict[str, float]]:
    """Return root mean squares of q and k of the layers from `first_layer` on that have both."""
    sizes: dict[int, dict[str, float]] = {}
    handles = []
    for i, layer in list(enumerate(target.get_decoder().layers))[first_layer:]:
        for name in ("q_proj", "k_proj"):
            module = getattr(getattr(layer, "self_attn", None), name, None)
            if module is None:
                continue

            def note(_m: Any, _args: Any, out: Tensor, i: int = i, name: str = name[0]) -> None:
                sizes.setdefault(i, {})[name] = out.float().square().mean().sqrt().item()

            handles.append(module.register_forward_hook(note))
    target.get_decoder()(input_ids=sample.to(target.device), use_cache=False)
    for handle in handles:
        handle.remove()
    return sizes
