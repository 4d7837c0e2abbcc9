"""Which worker serves 8-bit and 4-bit weights and KV, and the dtype of draft K/V: the cases of
docs/limits.md, each through SGLang's own resolution of its arguments."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang_dflash.checkpoint.embedded import demo_pair
from sglang_dflash.core.attention.backend import make_attention
from sglang_dflash.serving import target_model

PAIR = demo_pair("dense")
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
NVFP4 = {
    "quant_method": "modelopt",
    "quant_algo": "NVFP4",
    "kv_cache_quant_algo": "FP8",
    "ignore": ["lm_head"],
}


def quantized(folder: Path, name: str, config: dict[str, Any]) -> str:
    """A copy of the demo target or draft whose config declares quantized weights."""
    shutil.copytree(getattr(PAIR, name), folder / name)
    raw = json.loads((folder / name / "config.json").read_text())
    (folder / name / "config.json").write_text(json.dumps({**raw, "quantization_config": config}))
    return str(folder / name)


def argv(*flags: str, target: str = str(PAIR.target), draft: str = str(PAIR.draft)) -> list[str]:
    algorithm = ["--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", draft]
    return ["--model-path", target, *algorithm, *flags]


def worker_of(given: Any) -> str:
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    worker = SpeculativeAlgorithm.DFLASH.create_worker(given)
    return "builtin" if getattr(worker, "__name__", "") == "DFlashWorkerV2" else "ours"


def draft_dtype(given: Any, monkeypatch: pytest.MonkeyPatch) -> torch.dtype:
    """Of draft K/V, for a model in bfloat16, as our worker decides it."""
    from sglang.srt.arg_groups.overrides import resolving_view

    settings = resolving_view(given)
    monkeypatch.setattr(target_model, "get_model", lambda: settings)
    monkeypatch.setattr(target_model, "get_spec", lambda: settings)
    return target_model.draft_kv_dtype(torch.bfloat16)
