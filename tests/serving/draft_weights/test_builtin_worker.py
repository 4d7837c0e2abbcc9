"""SGLang's own worker: what it leaves out of a draft's weights is named, or refused."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from sglang.srt.models.dflash import DFlash2DraftModel, DFlashDraftModel
from sglang.srt.runtime_context import get_parallel
from torch import Tensor
from transformers import Qwen3Config

from sglang_dflash.common.errors import ConfigError
from sglang_dflash.drafting.weights import save_model
from sglang_dflash.serving.draft_weights.builtin_worker import load_weights
from tests.conftest import random_model, raw_config, with_own

OWN = with_own(selector_rank=8, selector_top_k=4, conv_kernel_size=2, conv_group_size=4)
RAW = raw_config(architectures=["DFlash2DraftModel"], **OWN)
Q = "layers.1.self_attn.q_proj"
Change = Callable[[dict[str, Tensor]], object]


@pytest.fixture(scope="module")
def tensors(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("draft")
    save_model(random_model(RAW), RAW, folder, torch.float32)
    return load_file(folder / "model.safetensors")


def loaded(tensors: dict[str, Tensor], load: Callable[..., Any] = load_weights) -> Any:
    """SGLang's model of the draft."""
    known = {name: value for name, value in RAW.items() if name != "architectures"}
    with get_parallel().override(tp_size=1, tp_rank=0, tp_group=None):
        model: Any = DFlash2DraftModel(Qwen3Config(**known))
        for parameter in model.parameters():
            parameter.data.fill_(torch.nan)
        load(DFlashDraftModel.load_weights, model, iter(tensors.items()))
    return model


def without_row(original: Any, *args: Any) -> None:
    original(*args)


def renamed(old: str, new: str) -> Change:
    return lambda t: t.update({new: t.pop(old)})


HARMLESS: dict[str, Change] = {
    "nothing": lambda t: None,
    "a copy of the target's head": lambda t: t.update({"lm_head.weight": torch.ones(64, 32)}),
    "a prefix": renamed("norm.weight", "model.norm.weight"),
    "a rotary cache": lambda t: t.update({"layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}),
    "a scale of K": lambda t: t.update({"layers.0.self_attn.k_proj.k_scale": torch.ones(1)}),
}
# What is lost, and the message.
LOST: dict[str, tuple[Change, str]] = {
    "packed fc": (
        renamed("fc.weight", "fc.weight_packed"),
        "fc.weight of.*nothing reads fc.weight_packed of",
    ),
    "one of three": (
        lambda t: t.pop(f"{Q}.weight"),
        "layers.1.self_attn.qkv_proj.weight of SGLang",
    ),
    "a convolution": (lambda t: t.pop("layers.0.mlp_conv.base_kernel"), "mlp_conv.base_kernel of"),
    # As turboderp's exporter writes it (exllamav3#390); our worker reads it.
    "a codebook": (
        renamed(
            "candidate_selector.successor_codebook", "candidate_selector.successor_codebook.weight"
        ),
        "candidate_selector.successor_codebook of SGLang.*reads"
        ".*successor_codebook.weight of the draft",
    ),
}


@pytest.mark.parametrize("case", HARMLESS)
def test_a_whole_draft_is_loaded_in_silence(
    case: str, tensors: dict[str, Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    given = dict(tensors)
    HARMLESS[case](given)
    model = loaded(given)
    assert not caplog.records
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    # Loaders are as before, and a later update may be of a few tensors.
    qkv = model.layers[0].self_attn.qkv_proj
    assert qkv.weight.weight_loader == qkv.weight_loader
    assert not hasattr(model.fc.weight, "weight_loader")
    load_weights(DFlashDraftModel.load_weights, model, [("norm.weight", torch.zeros(32))])
    assert not model.norm.weight.any()


def test_a_tensor_that_nothing_reads_is_named(
    tensors: dict[str, Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    extra = {f"layers.{i}.self_attn.gate.weight": torch.ones(4) for i in range(3)}
    with caplog.at_level(logging.WARNING):
        loaded({**tensors, **extra})
    (record,) = caplog.records
    assert "layers.0.self_attn.gate.weight, and 2 more of the draft" in record.getMessage()


@pytest.mark.parametrize("case", LOST)
def test_a_parameter_that_nothing_fills_is_refused(case: str, tensors: dict[str, Tensor]) -> None:
    change, message = LOST[case]
    given = dict(tensors)
    change(given)
    with pytest.raises(ConfigError, match=message):
        loaded(given)


@pytest.mark.parametrize("case", LOST)
def test_weights_are_lost_without_the_row(case: str, tensors: dict[str, Tensor]) -> None:
    """SGLang serves what was in the memory."""
    given = dict(tensors)
    LOST[case][0](given)
    model = loaded(given, without_row)
    assert any(parameter.isnan().any() for parameter in model.parameters())
