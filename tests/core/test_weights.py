"""Checkpoints: round trip, sharding, and everything that can be wrong with one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from sglang_dflash.config import ConfigError, DraftConfig
from sglang_dflash.core.attention import torch_block_attention
from sglang_dflash.core.model import DraftModel
from sglang_dflash.core.parallel import TensorParallel
from sglang_dflash.core.weights import check_shapes, load_model, load_state, read_tensors, save_model, tensor_shapes
from tests.conftest import random_model, raw_config


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    raw = raw_config()
    save_model(random_model(raw), raw, tmp_path, torch.float32)
    return tmp_path


def rewrite(folder: Path, change: Any) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


def test_published_names_and_round_trip(folder: Path) -> None:
    names = set(read_tensors(folder))
    assert {"fc.weight", "hidden_norm.weight", "norm.weight", "layers.2.self_attn.k_proj.weight", "layers.0.mlp.gate_proj.weight"} <= names
    again = load_model(folder, dtype=torch.float32).state_dict()
    first = load_state(DraftConfig.from_pretrained(folder), read_tensors(folder), TensorParallel())
    assert set(again) == set(first)
    assert all(torch.equal(again[n], first[n]) for n in again)


def test_a_prefix_and_copies_of_the_targets_tensors_are_accepted(folder: Path) -> None:
    def change(tensors: dict) -> None:
        for name in list(tensors):
            tensors["model." + name] = tensors.pop(name)
        tensors["model.embed_tokens.weight"] = torch.zeros(64, 32)

    rewrite(folder, change)
    load_model(folder, dtype=torch.float32)


def test_missing_tensor_is_named(folder: Path) -> None:
    rewrite(folder, lambda t: t.pop("layers.1.self_attn.k_proj.weight"))
    with pytest.raises(ConfigError, match=r"'layers\.1\.self_attn\.k_proj\.weight' is missing"):
        load_model(folder, dtype=torch.float32)


def test_left_over_tensor_is_named(folder: Path) -> None:
    rewrite(folder, lambda t: t.update({"selector.weight": torch.zeros(2)}))
    with pytest.raises(ConfigError, match=r"1 tensors that no DFlash v1 draft has, the first is 'selector\.weight'"):
        load_model(folder, dtype=torch.float32)


def test_wrong_shape_is_named_with_both_shapes(folder: Path) -> None:
    rewrite(folder, lambda t: t.update({"fc.weight": torch.zeros(32, 32)}))
    with pytest.raises(ConfigError, match=r"fc\.weight \[32, 32\]; the config asks for \[32, 64\]"):
        check_shapes(DraftConfig.from_pretrained(folder), tensor_shapes(folder))


def test_truncated_file_is_named(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ConfigError, match=r"model\.safetensors' is truncated or damaged"):
        tensor_shapes(folder)


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json in"):
        DraftConfig.from_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"no \.safetensors file in"):
        read_tensors(tmp_path)


@pytest.mark.parametrize("bias", [False, True])
def test_two_shards_sum_to_the_whole(tmp_path: Path, bias: bool) -> None:
    """Tensor parallelism by hand: both ranks run in lockstep, `all_reduce` adds what they hand in."""
    raw = raw_config(attention_bias=bias)
    save_model(random_model(raw), raw, tmp_path, torch.float32)
    whole = load_model(tmp_path, dtype=torch.float32)
    x, positions = torch.randn(1, 4, 32), torch.arange(4)[None]

    def attend(_layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch_block_attention(q, k, v, torch.ones(1, 1, 4, dtype=torch.bool))

    def run(sums: list[torch.Tensor]) -> tuple[list[list[torch.Tensor]], torch.Tensor]:
        """Run both ranks with the first sums known; what each hands in for the next one is recorded."""
        handed: list[list[torch.Tensor]] = [[], []]
        out = x
        for rank in range(2):

            def reduce(part: torch.Tensor, rank: int = rank) -> torch.Tensor:
                handed[rank].append(part)
                n = len(handed[rank])
                return sums[n - 1] if n <= len(sums) else part

            shard = load_model(tmp_path, dtype=torch.float32, tp=TensorParallel(rank, 2, reduce))
            out = shard(x, positions, attend)
        return handed, out

    sums: list[torch.Tensor] = []
    for n in range(2 * 3):
        handed, _ = run(sums)
        sums.append(handed[0][n] + handed[1][n])
    torch.testing.assert_close(run(sums)[1], whole(x, positions, attend), atol=1e-4, rtol=1e-4)


def test_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"--tp-size: 3 does not divide the draft's num_attention_heads \(4\)"):
        DraftModel(DraftConfig.from_dict(raw_config()), TensorParallel(0, 3))
