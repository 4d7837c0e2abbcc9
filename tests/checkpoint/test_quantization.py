"""Quantized drafts that our worker takes, by their configs; others keep their reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sglang_dflash.checkpoint.draft_config import DraftConfig
from sglang_dflash.common.errors import UnsupportedDraft
from tests.conftest import raw_config
from tests.quantized_checkpoints import EXPORTERS

CT = EXPORTERS["W4A16"].config
GPTQ = EXPORTERS["GPTQ"].config
MIXED = {
    "quant_method": "modelopt",
    "quant_algo": "MIXED_PRECISION",
    "quantized_layers": {"fc": {"quant_algo": "FP8"}, "layers.0.mlp": {"quant_algo": "NVFP4"}},
}


def weights(**changes: Any) -> dict[str, Any]:
    """Return a compressed-tensors config with other weights in a second group."""
    own = {"targets": ["re:.*fc"], "weights": {"num_bits": 4, "type": "int", **changes}}
    return {**CT, "config_groups": {**CT["config_groups"], "group_1": own}}


UNSERVED: dict[str, tuple[Any, str]] = {
    "another method": ({"quant_method": "bitsandbytes"}, "compressed-tensors, modelopt, awq, gptq"),
    "no method": ({}, "a quantized draft"),
    "no object": ([1], "a quantized draft"),
    "another layout": ({**CT, "format": "marlin-24"}, "compressed-tensors marlin-24 (4 bits)"),
    "other bits": (weights(num_bits=3), "compressed-tensors pack-quantized (3 bits)"),
    "two numbers of bits": (weights(num_bits=8), "two kinds of compressed-tensors pack-quantized"),
    "a rotation": ({**CT, "transform_config": {"config_groups": {"R1": {}}}}, "not served"),
    "zeros": ({**CT, "sparsity_config": {"format": "sparse-24-bitmask"}}, "not served"),
    "no groups": ({**CT, "config_groups": {}}, "a quantized draft"),
    "another algorithm": (
        {"quant_method": "modelopt", "quant_algo": "W4A16_AWQ"}, "modelopt W4A16_AWQ"
    ),
    "one of two": (
        {**MIXED, "quantized_layers": {"fc": {"quant_algo": "FP8"}, "norm": {"quant_algo": "X"}}},
        "modelopt X",
    ),
    "gemv": ({**EXPORTERS["AWQ"].config, "version": "GEMV"}, "awq gemv"),
    "no zero points": ({**EXPORTERS["AWQ"].config, "zero_point": False}, "zero points"),
    "3 bits": ({**GPTQ, "bits": 3}, "gptq gptq (3 bits)"),
    "marlin": ({**GPTQ, "is_marlin_format": True}, "gptq marlin"),
    "by module": ({**GPTQ, "dynamic": {"-:fc": {}}}, "other bits for some modules"),
}  # fmt: skip


@pytest.mark.parametrize("case", UNSERVED)
@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
def test_what_cannot_be_dequantized_is_left_to_sglangs_worker(case: str, key: str) -> None:
    value, reason = UNSERVED[case]
    with pytest.raises(UnsupportedDraft) as refused:
        DraftConfig.from_dict(raw_config(**{key: value}))
    assert key in refused.value.field and reason in refused.value.required


def test_two_ways_in_one_draft() -> None:
    config = DraftConfig.from_dict(raw_config(quantization_config=MIXED))
    assert str(config.quantization) == "modelopt FP8 (8 bits) and modelopt NVFP4 (4 bits)"
    again = DraftConfig.from_dict(raw_config(quantization_config=weights(group_size=32)))
    assert str(again.quantization) == "compressed-tensors pack-quantized (4 bits)"


@pytest.mark.parametrize("beside", [None, False, 0, ""])
def test_nothing_is_no_quantization(beside: Any, tmp_path: Path) -> None:
    raw = raw_config(quantization_config=beside)
    (tmp_path / "config.json").write_text(json.dumps(raw))
    file = tmp_path / "hf_quant_config.json"
    for content in ({}, {"quantization": None}, {"quantization": {"quant_algo": None}}):
        file.write_text(json.dumps(content))
        assert DraftConfig.from_pretrained(tmp_path).quantization is None
    file.write_text(json.dumps({"quantization": {"quant_algo": "FP8"}}))
    assert str(DraftConfig.from_pretrained(tmp_path).quantization) == "modelopt FP8 (8 bits)"
