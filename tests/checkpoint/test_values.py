"""Values of weights: what is found in which dtype, and how long it takes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from sglang_dflash.checkpoint.draft_config import DraftConfig
from sglang_dflash.checkpoint.tensors import _CHUNK, check_values, check_weights
from sglang_dflash.common.errors import ConfigError
from sglang_dflash.drafting.weights import load_model, save_model
from tests.conftest import random_model, raw_config, rewrite

# Its up and down projections have more elements than are looked at together.
WIDE = raw_config(intermediate_size=_CHUNK // 32 + 1, attention_bias=True)
UP = "layers.1.mlp.up_proj.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_model(random_model(WIDE), WIDE, tmp_path, torch.float32)
    return tmp_path


def put(folder: Path, name: str, at: int, value: float, dtype: torch.dtype) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors.update({key: tensor.to(dtype) for key, tensor in tensors.items()})
        tensors[name].view(-1)[at] = value

    rewrite(folder, change)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_the_largest_finite_value_is_accepted(folder: Path, dtype: torch.dtype) -> None:
    for value in (torch.finfo(dtype).max, torch.finfo(dtype).min, torch.finfo(dtype).tiny):
        put(folder, UP, -1, value, dtype)
        check_weights(DraftConfig.from_dict(WIDE), folder)


@pytest.mark.parametrize(
    ("dtype", "value", "at"),
    [
        *((torch.bfloat16, float("nan"), at) for at in (0, _CHUNK - 1, _CHUNK)),
        (torch.bfloat16, float("inf"), -1),
        (torch.float16, -float("inf"), -1),
        (torch.float16, -float("nan"), _CHUNK),
        (torch.float32, float("inf"), 0),
        (torch.float64, float("nan"), -1),
    ],
)
def test_one_value_is_found_anywhere(
    folder: Path, dtype: torch.dtype, value: float, at: int
) -> None:
    put(folder, UP, at, value, dtype)
    with pytest.raises(ConfigError, match=rf"^tensor {UP} of the draft: 1 of \d+ values are"):
        check_values(DraftConfig.from_dict(WIDE), folder)


def test_zeros_are_refused_in_a_weight_and_not_in_a_bias(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    for name in tensors:
        if name.endswith(".bias"):
            tensors[name].zero_()
    save_file(tensors, folder / "model.safetensors")
    load_model(folder, dtype=torch.float32)
    tensors[UP].zero_()[-1, -1] = 1e-30
    save_file(tensors, folder / "model.safetensors")
    load_model(folder, dtype=torch.float32)
    tensors[UP].zero_()
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=f"{UP} of the draft: all zeros"):
        load_model(folder, dtype=torch.float32)


def test_a_copy_of_the_targets_tensor_is_not_looked_at(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file(
        {"model." + name: tensor for name, tensor in tensors.items()}, folder / "a.safetensors"
    )
    names = ("model.embed_tokens.weight", "lm_head.weight")
    borrowed = {name: torch.full((64, 32), float("nan")) for name in names}
    save_file(borrowed, folder / "model.safetensors")
    load_model(folder, dtype=torch.float32)
