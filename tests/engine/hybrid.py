"""Small random Qwen3.5 targets, dense or with experts: three Gated DeltaNet layers and one of full
attention."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch

from sglang_dflash.tools.demo_pairs.pairs import demo_pair

# Of the draft that is made for them.
BLOCK_SIZE = 8
SHAPE: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "max_position_embeddings": 8192,
    "eos_token_id": 1022,
    "pad_token_id": 1020,
    "tie_word_embeddings": False,
    "dtype": "float32",
    # At a request's first tokens a head's output, a product of two random vectors, can be nearly
    # zero. Normalizing it with the usual 1e-6 magnifies its rounding, to ten times what it is
    # elsewhere; which tokens are hit depends on the machine and on the batches.
    "rms_norm_eps": 1e-3,
}


EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}


def config_of(kind: str = "Qwen3_5") -> Any:
    """Return a config of `SHAPE`: "Qwen3_5" is dense, "Qwen3_5Moe" and "Qwen3Next" have experts."""
    import transformers

    if kind == "Qwen3_5":
        config: Any = transformers.Qwen3_5TextConfig(**SHAPE, intermediate_size=128)
    elif kind == "Qwen3_5Moe":
        config = transformers.Qwen3_5MoeTextConfig(**SHAPE, **EXPERTS)
    else:
        config = transformers.Qwen3NextConfig(**SHAPE, **EXPERTS, norm_topk_prob=True)
    # Published configurations have it, and SGLang goes by it rather than by `layer_types`.
    config.full_attention_interval = 4
    config.architectures = [f"{kind}ForCausalLM"]
    return config


# Of random weights that leave no two tokens equally likely in the tests' answers (CLEAR in
# test_hybrid.py).
SEEDS = {"Qwen3_5": 0, "Qwen3_5Moe": 0, "Qwen3Next": 4}


def copy_tokenizer(folder: Path) -> None:
    """The demo models'."""
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(demo_pair("dense").target / name, folder)


def save_random_hybrid(folder: Path, kind: str = "Qwen3_5") -> None:
    """Write a float32 checkpoint, the same on every call, with the demo models' tokenizer."""
    import transformers

    config = config_of(kind)
    model: Any = getattr(transformers, config.architectures[0])(config)
    random = torch.Generator().manual_seed(SEEDS[kind])
    for name, parameter in model.float().named_parameters():
        if name.endswith("A_log"):
            # With dt_bias below: states that fade within a few tokens to several hundred.
            parameter.data.uniform_(-4, 0.5, generator=random)
        elif name.endswith("dt_bias"):
            parameter.data.uniform_(-2, 0, generator=random)
        else:
            # Wide enough that every layer moves the logits: greedy tokens then depend on the
            # recurrent states.
            mean = float("norm" in name and "linear_attn" in name)
            parameter.data.normal_(mean, 0.14 if parameter.ndim > 1 else 0.1, generator=random)
    model.save_pretrained(folder)
    copy_tokenizer(folder)
