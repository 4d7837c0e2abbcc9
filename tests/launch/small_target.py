"""A small target with random weights, a tokenizer and a chat template."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from sglang_dflash.tools.demo_pairs.pairs import demo_pair

PROMPTS = [
    "def add(a, b):", "What is a list?", "Write a loop.", "import os", "Why?", "class A:", "x = 1",
    "Explain return.",
]  # fmt: skip


def write_target(folder: Path) -> Path:
    """Random weights, large enough that its text depends on the prompt."""
    torch.manual_seed(0)
    config = Qwen3Config(  # type: ignore[call-arg]
        vocab_size=1024, hidden_size=64, intermediate_size=96, num_hidden_layers=7,
        num_attention_heads=4, num_key_value_heads=2, head_dim=64, tie_word_embeddings=True,
        initializer_range=0.1, max_position_embeddings=2048, rope_theta=1e6, eos_token_id=2,
        pad_token_id=0, bos_token_id=None,
    )  # fmt: skip
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    for file in demo_pair("dense").target.glob("tokenizer*"):
        shutil.copy(file, folder)
    return folder


def write_prompts(file: Path) -> Path:
    file.write_text("".join(json.dumps({"turns": [text]}) + "\n" for text in PROMPTS))
    return file
