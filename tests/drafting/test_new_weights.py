"""New weights in a network that serves: the same as one that was loaded with them."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sglang_dflash.checkpoint.tensors import expected_tensors
from sglang_dflash.common.errors import ConfigError
from sglang_dflash.drafting.model import DraftModel
from sglang_dflash.drafting.parallel import TensorParallel
from sglang_dflash.drafting.weights import (
    check_new,
    load_model,
    load_state,
    read_tensors,
    reload,
    save_model,
)
from tests.conftest import random_model, raw_config, with_own

OF_DFLASH2 = with_own(selector_rank=8, selector_top_k=4, conv_kernel_size=3, conv_group_size=8)
KINDS = {
    "dense": raw_config(attention_bias=True),
    "own-vocabulary": raw_config(draft_vocab_size=40),
    "dflash2": raw_config(**OF_DFLASH2),
}


@pytest.fixture(params=KINDS)
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, dict[str, Tensor]]:
    """A draft's folder, and the tensors of another draft of that config."""
    raw = KINDS[request.param]
    torch.manual_seed(0)
    old, new = random_model(raw), random_model(raw)
    new.token_ids = old.token_ids
    for model, name in ((old, "old"), (new, "new")):
        save_model(model, raw, tmp_path / name, torch.float32)
    return tmp_path / "old", read_tensors(tmp_path / "new")


def outputs(model: DraftModel) -> list[Tensor]:
    """Compute outputs that depend on weights of every kind."""
    config, torch_random = model.config, torch.Generator().manual_seed(1)
    hidden = torch.randn(5, config.target_hidden_width, generator=torch_random)
    embedded = torch.randn(2, 4, config.hidden_size, generator=torch_random)
    positions = torch.arange(4).expand(2, -1)

    def attend(_: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        groups = q.shape[-2] // k.shape[-2]
        return q + (k + v).repeat_interleave(groups, -2)

    found = [
        model.context_kv(hidden, torch.arange(5)),
        model(embedded.clone(), positions, attend),
        *(t for name, t in model.state_dict().items() if "codebook" in name),
    ]
    return found if model.lm_head is None else [*found, model.lm_head(embedded)]


def packed_as(folder: Path, how: str) -> DraftModel:
    model = load_model(folder, dtype=torch.float32)
    if how != "plain":
        model.pack(float16=how == "float16")
    return model


@pytest.mark.parametrize("how", ["plain", "packed", "float16"])
def test_new_weights_are_as_if_loaded(
    how: str, pair: tuple[Path, dict[str, Tensor]], tmp_path: Path
) -> None:
    """All of them, in two parts: query and key projections apart from the rest."""
    folder, tensors = pair
    served, expected = packed_as(folder, how), packed_as(tmp_path / "new", how)
    before = outputs(served)
    first = {name: t for name, t in tensors.items() if "q_proj" in name or "k_" in name}
    for part in (first, {name: t for name, t in tensors.items() if name not in first}):
        check_new(served, part)
        reload(served, part)
        # Context K/V and hidden states.
        assert not any(map(torch.equal, outputs(served)[:2], before))
    for got, want in zip(outputs(served), outputs(expected), strict=True):
        assert torch.equal(got, want)


def test_memory_that_recorded_steps_read_stays(pair: tuple[Path, dict[str, Tensor]]) -> None:
    folder, tensors = pair
    model = load_model(folder, dtype=torch.bfloat16)
    places = [t.data_ptr() for t in (*model.state_dict().values(), *model._joined) if t is not None]
    reload(model, tensors)
    assert places == [
        t.data_ptr() for t in (*model.state_dict().values(), *model._joined) if t is not None
    ]


@pytest.mark.parametrize("size", [2, 4])
def test_a_rank_takes_its_shard(size: int, pair: tuple[Path, dict[str, Tensor]]) -> None:
    folder, tensors = pair
    for rank in range(size):
        tp = TensorParallel(rank, size)
        model = load_model(folder, dtype=torch.float32, tp=tp)
        reload(model, tensors)
        want = load_state(model.config, tensors, tp)
        assert model.state_dict().keys() == want.keys()
        for name, own in model.state_dict().items():
            assert torch.equal(own, want[name]), name


def changed(tensors: Mapping[str, Tensor], name: str, by: Any) -> dict[str, Tensor]:
    return {**tensors, name: by(tensors[name])}


def with_nan(tensor: Tensor) -> Tensor:
    broken = tensor.clone()
    broken.flatten()[3] = float("nan")
    return broken


K = "layers.1.self_attn.k_proj.weight"
WRONG: dict[str, tuple[Any, str]] = {
    "name": (lambda t: {**t, "layers.9.q": t[K]}, r"layers\.9\.q'; no draft of this config"),
    "shape": (lambda t: changed(t, K, lambda w: w[:-1]), rf"{K}.*the config asks for \[32, 32\]"),
    "dtype": (lambda t: changed(t, K, lambda w: w.int()), rf"{K}.*I32.*BF16, F16"),
    "NaN": (lambda t: changed(t, K, with_nan), rf"{K}.*1 of 1024 values are NaN"),
    "vocabulary": (lambda t: {**t, "d2t": torch.arange(9)}, "d2t of the draft.*another vocab"),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_tensors_are_named(what: str, tmp_path: Path) -> None:
    change, message = WRONG[what]
    model = random_model(KINDS["dense"])
    save_model(model, KINDS["dense"], tmp_path, torch.float32)
    tensors = read_tensors(tmp_path)
    assert tensors.keys() == expected_tensors(model.config).keys()
    check_new(model, copy.copy(tensors))
    with pytest.raises(ConfigError, match=message):
        check_new(model, change(tensors))
    # Copies of what the draft borrows are left out, as when it is loaded.
    check_new(model, {"embed_tokens.weight": torch.zeros(3)})
