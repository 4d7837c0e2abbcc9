"""A draft's config.json as training libraries write it, and what docs/training.md changes in it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import Qwen3Config

from sglang_dflash.checkpoint.draft_config import DraftConfig
from sglang_dflash.checkpoint.heads.dflash2 import Convolution, DFlash2Config, Selector
from sglang_dflash.common.errors import ConfigError, UnsupportedDraft
from sglang_dflash.drafting.weights import load_model
from tests import ROOT
from tests.errors import refused

PAGE = (ROOT / "docs/training.md").read_text()
NETWORK: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "vocab_size": 128, "rms_norm_eps": 1e-6, "max_position_embeddings": 4096,
}  # fmt: skip
OWN = {"mask_token_id": 127, "target_layer_ids": [1, 4, 7]}

# Configs of sgl-project/SpecForge at a6b6b02, e.g. configs/qwen3-8b-dflash.json, with these sizes.
SPECFORGE: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"], "attention_bias": False, "attention_dropout": 0.0,
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"}, "block_size": 16, "bos_token_id": 1,
    "dflash_config": OWN, "dtype": "bfloat16", "eos_token_id": 2, "hidden_act": "silu",
    "initializer_range": 0.02, "layer_types": ["full_attention"] * 3, "max_window_layers": 3,
    "model_type": "qwen3", "num_hidden_layers": 3, "num_target_layers": 10, "rope_scaling": None,
    "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": False, "use_cache": True,
    "use_sliding_window": False, **NETWORK,
}  # fmt: skip


def of_automodel(window: int | None, architecture: str, **of_dflash2: int) -> dict[str, Any]:
    """Return the saved config of `_build_qwen3_draft_config` in NeMo Automodel's train_dflash.py: a
    Qwen3 config of the target's fields."""
    kind = "full_attention" if window is None else "sliding_attention"
    config = Qwen3Config.from_dict(
        {
            **NETWORK, "architectures": [architecture], "num_hidden_layers": 3,
            "layer_types": [kind] * 3, "sliding_window": window, "max_window_layers": 3,
            "use_sliding_window": window is not None, "is_causal": False, "num_target_layers": 10,
            "block_size": 16, "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"},
            "dflash_config": {"block_size": 16, **OWN, **of_dflash2},
        }
    )  # fmt: skip
    return config.to_diff_dict()


# torchspec/config/dflash_draft_config.json of lightseekorg/TorchSpec at 6f21829, with these sizes.
TORCHSPEC: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"], "model_type": "dflash", "num_hidden_layers": 2,
    "rope_theta": 1000000.0, "num_target_layers": 3, "target_hidden_size": 64,
    "target_num_hidden_layers": 10, **OWN, "tie_word_embeddings": False, **NETWORK,
}  # fmt: skip


def test_specforge() -> None:
    config = DraftConfig.from_dict(SPECFORGE)
    assert config.block_size == 16 and config.target_layer_ids == (1, 4, 7)
    assert all(layer.sliding_window is None and not layer.causal for layer in config.layers)
    slides = {"layer_types": ["sliding_attention"] * 3, "sliding_window": 64}
    slides["use_sliding_window"] = True
    # Causal inside a block, by `create_dflash_sdpa_mask` of its dflash_family_model.py.
    layers = DraftConfig.from_dict(SPECFORGE | slides).layers
    assert {(layer.sliding_window, layer.causal) for layer in layers} == {(64, True)}


@pytest.mark.parametrize("window", [None, 2048])
def test_nemo_automodel(window: int | None) -> None:
    config = DraftConfig.from_dict(of_automodel(window, "Qwen3DFlashDraftModel"))
    assert config.block_size == 16 and config.target_layer_ids == (1, 4, 7)
    assert {(la.sliding_window, la.causal) for la in config.layers} == {(window, False)}
    head = {
        "selector_rank": 8, "selector_top_k": 4, "conv_kernel_size": 2, "conv_group_size": 16,
    }  # fmt: skip
    second = DraftConfig.from_dict(of_automodel(window, "Qwen3DFlash2DraftModel", **head))
    assert second.head == DFlash2Config(Convolution(2, 16), Selector(8, 4))
    named = of_automodel(window, "DFlashDraftModel")
    assert DraftConfig.from_dict(named) == config


def changed(raw: dict[str, Any], block_size: int) -> dict[str, Any]:
    """A config of TorchSpec with what the page changes."""
    moved = {name: raw[name] for name in ("mask_token_id", "target_layer_ids")}
    gone = (*moved, "target_num_hidden_layers")
    kept = {name: value for name, value in raw.items() if name not in gone}
    return {
        **kept, "model_type": "qwen3", "num_target_layers": raw["target_num_hidden_layers"],
        "block_size": block_size, "dflash_config": moved,
    }  # fmt: skip


RENAMED = {
    "context_proj.weight": "fc.weight",
    "context_norm.weight": "hidden_norm.weight",
    "final_norm.weight": "norm.weight",
}


def test_torchspec(tmp_path: Path) -> None:
    with refused("model_type in the draft's config.json", "dflash", error=UnsupportedDraft):
        DraftConfig.from_dict(TORCHSPEC)
    # With the name alone, its number of features would be taken for the target's layers.
    with pytest.raises(ConfigError):
        DraftConfig.from_dict(TORCHSPEC | {"model_type": "qwen3"})
    raw = changed(TORCHSPEC, block_size=16)
    config = DraftConfig.from_dict(raw)
    assert config.num_target_layers == 10 and config.target_layer_ids == (1, 4, 7)
    assert all(f"`{old}`" in PAGE and f"`{new}`" in PAGE for old, new in RENAMED.items())
    theirs = {"embed_tokens.weight": (128, 64), "context_proj.weight": (64, 192)}
    theirs |= {"context_norm.weight": (64,), "final_norm.weight": (64,)}
    for i in range(2):
        shapes = {
            "self_attn.q_proj": (64, 64), "self_attn.k_proj": (32, 64),
            "self_attn.v_proj": (32, 64), "self_attn.o_proj": (64, 64), "self_attn.q_norm": (16,),
            "self_attn.k_norm": (16,), "mlp.gate_proj": (96, 64), "mlp.up_proj": (96, 64),
            "mlp.down_proj": (64, 96), "input_layernorm": (64,), "post_attention_layernorm": (64,),
        }  # fmt: skip
        theirs |= {f"layers.{i}.{name}.weight": shape for name, shape in shapes.items()}
    weights = {name: torch.randn(shape) for name, shape in theirs.items()}
    ours = {RENAMED.get(n, n): w for n, w in weights.items() if n != "embed_tokens.weight"}
    save_file(ours, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(raw))
    model = load_model(tmp_path, dtype=torch.float32)
    assert torch.equal(model.fc.weight, weights["context_proj.weight"])
    assert torch.equal(model.norm.weight, weights["final_norm.weight"])
