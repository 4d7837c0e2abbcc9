"""Tiny random targets, one of each kind of the published table and of others that SGLang can
capture: float32 checkpoints of 4 layers and a hidden size of 64, with the demo models' tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file

from tests.engine.hybrid import SHAPE, copy_tokenizer
from tests.engine.tokens import name_tokens

# Of DeepSeek's attention: a latent of 32 and 16 rotated dims are cached, whatever the heads.
LATENT: dict[str, Any] = {
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    # In Transformers the rotated dims, and an epsilon that norms of the latent always have there.
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 32,
    "intermediate_size": 128,
    "first_k_dense_replace": 1,
}
_GROUPS = {"n_group": 4, "topk_group": 2}
# Fields that the published config.json has and Transformers 5 does not write.
_ROUTING = {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1}
YARN = {
    "type": "yarn",
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 2048,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 1024,
}


class Kind(NamedTuple):
    """A kind of target.

    Attributes:
        config: the name of Transformers' class of its configuration.
        model: of its model.
        fields: of the configuration, beside `SHAPE`.
        published: fields that config.json gets besides.
    """

    config: str
    model: str
    fields: Mapping[str, Any]
    published: Mapping[str, Any] = MappingProxyType({})


# Gemma 4's special tokens, by their names in its configuration: ids of the demo vocabulary, texts.
_GEMMA_TOKENS = {
    "image_token_id": (1016, "<|image|>"),
    "boi_token_id": (1017, "<|image>"),
    "eoi_token_id": (1018, "<image|>"),
    "video_token_id": (1019, "<|video|>"),
    "audio_token_id": (1015, "<|audio|>"),
    "boa_token_id": (1014, "<|audio>"),
    "eoa_token_index": (1013, "<audio|>"),
}
_GEMMA_VISION = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "position_embedding_size": 64,
    "standardize": True,
}


def _shape(**fields: Any) -> dict[str, Any]:
    """`SHAPE` without what only Gated DeltaNet has."""
    own = {key: value for key, value in SHAPE.items() if not key.startswith("linear_")}
    return {**own, "bos_token_id": None, **fields}


def _gemma4(**fields: Any) -> dict[str, Any]:
    """Return the fields of the class with images, as the published ones: full layers have wider
    heads, fewer keys, and keys for values."""
    text = _shape(
        intermediate_size=128,
        hidden_size_per_layer_input=0,
        num_key_value_heads=4,
        global_head_dim=64,
        num_global_key_value_heads=1,
        attention_k_eq_v=True,
        sliding_window=32,
        layer_types=["sliding_attention", "full_attention"] * 2,
        final_logit_softcapping=30.0,
        use_bidirectional_attention="vision",
        tie_word_embeddings=True,
        **fields,
    )
    tokens = {name: token for name, (token, _) in _GEMMA_TOKENS.items()}
    return {**tokens, "text_config": text, "vision_config": _GEMMA_VISION}


KINDS: dict[str, Kind] = {
    "gpt-oss": Kind(
        "GptOssConfig",
        "GptOssForCausalLM",
        _shape(
            num_local_experts=8,
            num_experts_per_tok=2,
            intermediate_size=32,
            sliding_window=32,
            layer_types=["sliding_attention", "full_attention"] * 2,
            rope_parameters={**YARN, "rope_theta": 150000.0, "truncate": False},
        ),
    ),
    "deepseek-v3": Kind(
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        _shape(**LATENT, **_GROUPS, rope_parameters={**YARN, "rope_theta": 10000.0}),
        {**_ROUTING, "rope_scaling": YARN, "rope_theta": 10000.0},
    ),
    "glm4-moe-lite": Kind(
        "Glm4MoeLiteConfig",
        "Glm4MoeLiteForCausalLM",
        _shape(**{**LATENT, "v_head_dim": 48}, n_group=1, topk_group=1),
        {**_ROUTING},
    ),
    "lfm2": Kind(
        "Lfm2Config",
        "Lfm2ForCausalLM",
        _shape(
            intermediate_size=128,
            layer_types=["conv", "conv", "full_attention", "conv"],
            tie_word_embeddings=True,
        ),
    ),
    "gemma4": Kind("Gemma4Config", "Gemma4ForConditionalGeneration", _gemma4()),
    "gemma4-moe": Kind(
        "Gemma4Config",
        "Gemma4ForConditionalGeneration",
        _gemma4(enable_moe_block=True, num_experts=8, top_k_experts=2, moe_intermediate_size=32),
    ),
    "llama3": Kind(
        "LlamaConfig",
        "LlamaForCausalLM",
        _shape(intermediate_size=128, rope_parameters=LLAMA3),
    ),
    "qwen3-moe": Kind(
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        _shape(
            num_experts=8,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            intermediate_size=128,
            norm_topk_prob=True,
        ),
    ),
}

GEMMA4_KINDS = ("gemma4", "gemma4-moe")


def save_target(folder: Path, name: str) -> None:
    """Write the checkpoint of that kind, the same on every call."""
    import transformers

    kind = KINDS[name]
    config: Any = getattr(transformers, kind.config)(**kind.fields)
    config.architectures = [kind.model]
    model: Any = getattr(transformers, kind.model)(config).float()
    randomize(model)
    model.save_pretrained(folder)
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **kind.published}))
    copy_tokenizer(folder)


def save_gemma4(folder: Path, name: str) -> None:
    """Write that kind, with the processors that SGLang asks for, also to serve texts only."""
    save_target(folder, name)
    (file,) = folder.glob("*.safetensors")
    weights = load_file(file)
    for key, tensor in weights.items():
        if key.endswith("embed_tokens.weight"):
            # A tied model repeats its last token if embeddings are wide. Answers must not have
            # placeholders: Transformers embeds them in another way than SGLang.
            tensor /= 2
            tensor[list(dict(_GEMMA_TOKENS.values()))] = 0
        elif key.endswith("layer_scalar"):
            tensor.fill_(0.75)
    save_file(weights, file, metadata={"format": "pt"})
    name_tokens(folder, dict(_GEMMA_TOKENS.values()), special=True)
    file = folder / "tokenizer_config.json"
    named = {key.partition("_")[0]: text for key, (_, text) in _GEMMA_TOKENS.items()}
    raw = json.loads(file.read_text()) | {f"{key}_token": text for key, text in named.items()}
    file.write_text(json.dumps(raw))
    parts = {"image_processor": "ImageProcessor", "video_processor": "VideoProcessor"}
    parts |= {"feature_extractor": "AudioFeatureExtractor"}
    processors = {key: {f"{key}_type": f"Gemma4{part}"} for key, part in parts.items()}
    processors["image_processor"]["max_soft_tokens"] = 70
    outer = {"processor_class": "Gemma4Processor", **processors}
    (folder / "processor_config.json").write_text(json.dumps(outer))


# Sizes of a vision tower, by the published names: those of the projector are the last two.
KIMI_VISION = {
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "init_pos_emb_height": 8,
    "init_pos_emb_width": 8,
    "vt_hidden_size": 64,
    "text_hidden_size": SHAPE["hidden_size"],
}


def save_kimi(folder: Path) -> None:
    """Write the kind `deepseek-v3` as the language model of Kimi-K2.5's class, without weights of
    its vision tower: SGLang takes texts only, and needs no image processor."""
    save_target(folder, "deepseek-v3")
    (weights,), config = folder.glob("*.safetensors"), folder / "config.json"
    inner = {f"language_model.{name}": tensor for name, tensor in load_file(weights).items()}
    save_file(inner, weights, metadata={"format": "pt"})
    outer = {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "dtype": "float32",
        "text_config": json.loads(config.read_text()),
        "vision_config": KIMI_VISION,
        "media_placeholder_token_id": SHAPE["pad_token_id"],
        "language_model_only": True,
    }
    config.write_text(json.dumps(outer))


def randomize(model: torch.nn.Module) -> None:
    """Weights so wide that every layer moves the logits."""
    random = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if "norm" in name and name.endswith("weight"):
            parameter.data += torch.randn(parameter.shape, generator=random) / 10
        else:
            parameter.data.normal_(0, 0.14 if parameter.ndim > 1 else 0.1, generator=random)
