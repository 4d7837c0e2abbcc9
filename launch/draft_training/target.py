"""The target: a small Qwen3."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from . import data


def build_target(tokenizer: Tokenizer) -> PreTrainedModel:
    """6.4 M parameters. Of 12 x 192, 8 x 256, 10 x 256 and 6 x 320 (layers x width) it trains the
    most parameters per CPU second."""
    config = Qwen3Config(
        vocab_size=data.VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=32768,
        tie_word_embeddings=True,
        rope_theta=1000000.0,
        eos_token_id=tokenizer.token_to_id(data.IM_END),
        pad_token_id=tokenizer.token_to_id(data.END_OF_TEXT),
        bos_token_id=None,
    )
    return Qwen3ForCausalLM(config)


def next_token_loss(model: PreTrainedModel, ids: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Mean cross entropy in nats and the argmax accuracy over `ids` `[B, L]`."""
    logits = model(input_ids=ids[:, :-1], use_cache=False).logits.flatten(0, 1)
    labels = ids[:, 1:].flatten()
    return F.cross_entropy(logits, labels), (logits.argmax(-1) == labels).float().mean().item()


def save_target(model: PreTrainedModel, tokenizer: Tokenizer, folder: Path) -> None:
    """Write the target as a bfloat16 Hugging Face checkpoint with tokenizer and chat template."""
    model.to(torch.bfloat16).save_pretrained(folder)
    ends = [tokenizer.token_to_id(data.IM_END), tokenizer.token_to_id(data.END_OF_TEXT)]
    GenerationConfig(eos_token_id=ends, pad_token_id=ends[1], do_sample=False).save_pretrained(
        folder
    )
    data.save_tokenizer(tokenizer, folder)


def load_target(folder: Path) -> PreTrainedModel:
    """The saved target in float32, frozen."""
    return (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        .eval()
        .requires_grad_(False)
    )
