"""A draft that is said to have another precision than its target, and K/V that is to be in FP8."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.quantization.fp8 import Fp8Config
from sglang.srt.layers.quantization.modelopt_quant import ModelOptFp4Config, ModelOptFp8Config
from sglang.srt.mem_cache.kv_cache_dtype import configure_kv_cache_dtype

from sglang_dflash.checkpoint.precision import asks_fp8_kv, other_precision, precision
from tests.quantized_checkpoints import EXPORTERS

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


EIGHT_BITS = {"type": "float", "num_bits": 8, "dynamic": False}
# quantization_config -> SGLang's class for it.
SECTIONS: list[tuple[dict[str, Any], Any]] = [
    ({"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8"}, ModelOptFp4Config),
    ({"quant_algo": "NVFP4", "kv_cache_quant_algo": None}, ModelOptFp4Config),
    ({"quant_algo": "NVFP4", "kv_cache_scheme": EIGHT_BITS}, ModelOptFp4Config),
    ({"quant_algo": "NVFP4", "kv_cache_scheme": EIGHT_BITS | {"num_bits": 4}}, ModelOptFp4Config),
    ({"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}, ModelOptFp8Config),
    ({"quant_algo": "FP8", "kv_cache_scheme": EIGHT_BITS}, ModelOptFp8Config),
    ({"quant_algo": "FP8"}, ModelOptFp8Config),
    ({"activation_scheme": "dynamic", "weight_block_size": [128, 128]}, Fp8Config),
    ({"activation_scheme": "dynamic", "kv_cache_scheme": EIGHT_BITS}, Fp8Config),
]


@pytest.mark.parametrize(("section", "theirs"), SECTIONS, ids=str)
def test_the_dtype_of_kv_is_the_one_that_sglang_reads(section: dict[str, Any], theirs: Any) -> None:
    method = "fp8" if theirs is Fp8Config else "modelopt"
    model = SimpleNamespace(quant_config=theirs.from_config({"quant_method": method, **section}))
    _, dtype = configure_kv_cache_dtype(
        server_args_kv_cache_dtype="auto",
        model=model,  # type: ignore[arg-type]
        model_dtype=torch.bfloat16,
        is_draft_worker=False,
        is_dflash=False,
        speculative_draft_attention_backend="",
    )
    for raw in (
        {"quantization_config": section}, {"text_config": {"quantization_config": section}},
    ):  # fmt: skip
        assert asks_fp8_kv(raw) == (dtype == torch.float8_e4m3fn)
    assert not asks_fp8_kv({})
