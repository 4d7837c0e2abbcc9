"""The `code` pair's target: it learns library code in general and memorizes no file.

Its draft, to be trained on the target's own continuations, is not here yet.
"""

from __future__ import annotations

import random
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from . import data
from .loop import train
from .target import next_token_loss

VOCAB_SIZE = 2048
WINDOW = 448
BATCH = 7


def build_target(tokenizer: Tokenizer) -> PreTrainedModel:
    """6.4 M parameters. Of 12 x 192, 8 x 256, 10 x 256 and 6 x 320 (layers x width) it trains the
    most parameters per CPU second."""
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
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


def train_target(
    stream: torch.Tensor, tokenizer: Tokenizer, work: Path, steps: int, begin: Path | None
) -> PreTrainedModel:
    """Train on windows of `stream`, from the checkpoint `begin` if given."""
    torch.manual_seed(0)
    if begin is None:
        model = build_target(tokenizer)
    else:
        model = AutoModelForCausalLM.from_pretrained(begin, dtype=torch.float32)
    windows = data.WindowSampler(stream, tokenizer, WINDOW, chat_share=0.1)

    def loss_of(rng: random.Random) -> tuple[torch.Tensor, dict[str, float]]:
        loss, accuracy = next_token_loss(model, windows.sample(BATCH, rng))
        return loss, {"accuracy": accuracy}

    train("target", model, loss_of, steps=steps, lr=5e-3, work=work)
    return model.eval()
