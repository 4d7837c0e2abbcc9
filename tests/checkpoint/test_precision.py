"""A draft that is said to have another precision than its target."""

from __future__ import annotations

from typing import Any

import pytest

from sglang_dflash.checkpoint.precision import other_precision, precision
from tests.quantized_draft import EXPORTERS

CONFIGS = {name: {"quantization_config": exporter.config} for name, exporter in EXPORTERS.items()}
NAMES = {
    "sapidlabs/Laguna-S-2.1-DFlash-NVFP4": "NVFP4",
    "RadixArk/Qwen3.8-27B-NVFP4": "NVFP4",
    "chutesai/Qwen3-32B-FP8-DFLASH": "FP8",
    "nvidia/NVIDIA-Nemotron-3.5-Lightning-30B-A3B-NVFP4-DFlash": "NVFP4",
    "some/Qwen3-8B-W4A16/": "INT4",
    "some/Qwen3-8B-GPTQ-Int4": "INT4",
    "some/Qwen3-8B-W8A8": "INT8",
    "openai/gpt-oss-20b-MXFP4": "MXFP4",
    "fp8/Qwen3-8B": None,
    "z-lab/Qwen3-4B-DFlash-b16": None,
}


@pytest.mark.parametrize("name", NAMES)
def test_names(name: str) -> None:
    assert precision(name, {}) == NAMES[name]
    # The name counts: a draft in 4 bits may be for a target of another precision.
    assert precision(name, CONFIGS["GPTQ"]) == (NAMES[name] or "INT4")


@pytest.mark.parametrize("name", EXPORTERS)
def test_configs(name: str) -> None:
    said = next(p for p in ("NVFP4", "FP8", "INT8", "") if p in name) or "INT4"
    expected = "INT4" if name == "W8A16" else said
    assert precision("x", CONFIGS[name]) == expected


NVFP4, FP8 = CONFIGS["ModelOpt-NVFP4"], CONFIGS["FP8-blocks"]
PAIRS: list[tuple[tuple[str, Any, str, Any], str | None]] = [
    (("t", FP8, "d-NVFP4", {}), "draft d-NVFP4 is said to be in NVFP4, target t in FP8"),
    (("t", {}, "d", CONFIGS["W4A16"]), "draft d is said to be in INT4, target t in 16 bits"),
    (("t", NVFP4, "d-NVFP4", CONFIGS["W4A16"]), None),
    (("t", FP8, "d", {}), None),
    (("t", {}, "d", {}), None),
    (("t-FP8", {"quantization_config": None}, "d", FP8), None),
]


@pytest.mark.parametrize(("pair", "warning"), PAIRS)
def test_pairs(pair: tuple[str, Any, str, Any], warning: str | None) -> None:
    warnings = other_precision(*pair)
    assert len(warnings) == (warning is not None)
    assert all(warning in text and "0 % with the same in" in text for text in warnings)
