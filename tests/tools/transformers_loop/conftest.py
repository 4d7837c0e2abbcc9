"""A tiny random target and draft, made once; for outputs that are exact for any draft."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from sglang_dflash import DFlashDraftModel
from sglang_dflash.drafting.weights import save_model
from tests.conftest import random_model, raw_config

SHAPE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "eos_token_id": None,
    "bos_token_id": None,
}
NEW_TOKENS = 24


@pytest.fixture(scope="session")
def target() -> Any:
    torch.manual_seed(5)
    return randomized(Qwen3ForCausalLM(Qwen3Config(**SHAPE, tie_word_embeddings=True)))


def randomized(model: Any) -> Any:
    """Large weights, so that the logits are far apart and rounding does not decide."""
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5 if parameter.ndim == 2 else 1.0)
    return model.eval()


def greedy(target: Any, ids: torch.Tensor, stop: int | None = None) -> list[int]:
    """The tokens of Transformers' own greedy generation."""
    out = target.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=stop)
    return out[0, ids.shape[1] :].tolist()


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("draft")
    torch.manual_seed(0)
    save_model(random_model(raw_config()), raw_config(), made, torch.float32)
    return made


@pytest.fixture
def draft(folder: Path) -> DFlashDraftModel:
    return DFlashDraftModel.from_pretrained(str(folder))
