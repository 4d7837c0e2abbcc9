"""The worker that serves 8-bit and 4-bit weights and KV, and the dtype of draft K/V: the cases of
docs/limits.md, each through SGLang's own resolution of its arguments."""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang.srt.arg_groups import overrides
from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view

from sglang_dflash.checkpoint.draft_config import DraftConfig
from sglang_dflash.common.errors import ConfigError
from sglang_dflash.serving.gpu.backends import draft_kv_dtype
from sglang_dflash.serving.start import check_pair
from sglang_dflash.serving.start.choose_worker import unserved
from sglang_dflash.tools.demo_pairs.pairs import demo_pair
from tests.broken_drafts import server_flags
from tests.quantized_checkpoints import EXPORTERS
from tests.serving.in_process import decode_of, filled, worker_of
from tests.serving.published import Arrived, serving

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


DRAFT_KV = "--speculative-draft-kv-cache-dtype"
KV = {
    (): torch.bfloat16,
    ("--kv-cache-dtype", "fp8_e4m3"): torch.float8_e4m3fn,
    ("--kv-cache-dtype", "fp8_e4m3", DRAFT_KV, "bf16"): torch.bfloat16,
    (DRAFT_KV, "fp8_e4m3"): torch.float8_e4m3fn,
}


@pytest.mark.parametrize("resolved", ["torch_native", "fa4"])
@pytest.mark.parametrize("flags", KV, ids=" ".join)
def test_8_bit_kv_is_served(
    flags: tuple[str, ...], resolved: str, resolve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launching process checks it as on a GPU that can (test_draft_backends.py).

    `resolved` is the target's attention, which SGLang resolves the draft's to after that check.
    """
    given, config = resolve(server_flags(*flags)), DraftConfig.from_pretrained(str(PAIR.draft))
    declare_resolution(given, "test", speculative_draft_attention_backend=resolved)
    assert serving(given) == "ours" and draft_kv_dtype(given, torch.bfloat16) == KV[flags]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    on_a_gpu = Arrived(resolving_view(given), {"device": "cuda"})
    with contextlib.nullcontext() if KV[flags] == torch.bfloat16 else pytest.raises(ConfigError):
        check_pair._check_device(given, on_a_gpu, config)


ASKED = "--speculative-draft-model-quantization"


@pytest.mark.parametrize(
    ("flags", "worker"),
    [
        ((ASKED, "fp8"), "builtin"),
        ((ASKED, "unquant", "--quantization", "fp8"), "ours"),
        (("--quantization", "fp8"), "ours"),
    ],
)
def test_a_draft_is_quantized_by_sglang_only(
    flags: tuple[str, ...], worker: str, resolve: Any
) -> None:
    """A quantization of the target is none of the draft, which stays as it is stored."""
    assert serving(resolve(server_flags(*flags))) == worker


NO_4_BIT = "a 4-bit --kv-cache-dtype without --speculative-draft-kv-cache-dtype"
# SGLang takes these on a Blackwell GPU only: the settings as they would arrive there, why our
# worker does not serve, and the dtype of its draft K/V if it does.
NVFP4_KV, DRAFTS = {"kv_cache_dtype": "nvfp4"}, "speculative_draft_kv_cache_dtype"
ATTENTION = "speculative_draft_attention_backend"
BLACKWELL: list[tuple[dict[str, str], str | None, torch.dtype | None]] = [
    ({"kv_cache_dtype": "mxfp8"}, None, torch.float8_e4m3fn),
    (NVFP4_KV, NO_4_BIT, None),
    ({"kv_cache_dtype": "fp4_mx_block16"}, NO_4_BIT, None),
    ({**NVFP4_KV, DRAFTS: "bf16"}, None, torch.bfloat16),
    ({**NVFP4_KV, DRAFTS: "fp8_e4m3"}, None, torch.float8_e4m3fn),
    ({**NVFP4_KV, ATTENTION: "fa4"}, None, torch.bfloat16),
]


@pytest.mark.parametrize(("changes", "reason", "dtype"), BLACKWELL)
def test_kv_of_a_blackwell_gpu(
    changes: dict[str, str],
    reason: str | None,
    dtype: torch.dtype | None,
    resolve: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """SGLang resolves the draft's attention to FA4 there, if none is asked for, and that does not
    change who serves."""
    given = resolve(server_flags())
    arrived = Arrived(given, changes)
    for resolved in ({}, {ATTENTION: "fa4"}):
        settings = Arrived(resolving_view(given), {**changes, **resolved})
        assert unserved(arrived, settings, str(PAIR.draft)) == reason
        monkeypatch.setattr(overrides, "resolving_view", lambda _, view=settings: view)
        if dtype is not None:
            assert draft_kv_dtype(arrived, torch.bfloat16) == dtype


@pytest.mark.parametrize("config", [FP8, NVFP4], ids=["fp8", "nvfp4"])
def test_a_quantized_target_is_served(config: dict[str, Any], resolve: Any, tmp_path: Path) -> None:
    """Its lm_head decides, when it is loaded: tests/serving/start/test_start_up.py."""
    given = resolve(server_flags(target=quantized(tmp_path, "target", config)))
    assert serving(given) == "ours"
    # Also if the checkpoint asks for 8-bit KV of the target.
    assert draft_kv_dtype(given, torch.bfloat16) == torch.bfloat16


@pytest.mark.parametrize("name", EXPORTERS)
def test_a_quantized_draft_is_served_whatever_the_targets_quantization(
    name: str, resolve: Any, tmp_path: Path
) -> None:
    folder = tmp_path / "quantized"
    EXPORTERS[name].write(PAIR.draft, folder, tmp_path / "plain")
    if name.startswith("GPTQ"):
        # SGLang knows it on a GPU only.
        with pytest.raises(ConfigError, match="Unknown quantization method: gptq"):
            resolve(server_flags(draft=folder))
        assert DraftConfig.from_pretrained(folder).quantization is not None
        return
    target = quantized(tmp_path, "target", FP8)
    for flags in (server_flags(draft=folder), server_flags(target=target, draft=folder)):
        given = resolve(flags)
        assert serving(given) == "ours"
        assert draft_kv_dtype(given, torch.bfloat16) == torch.bfloat16


def test_another_quantized_draft_goes_to_the_built_in_worker(
    resolve: Any, tmp_path: Path, capfd: Any
) -> None:
    config = {**EXPORTERS["AWQ"].config, "version": "gemv"}
    assert serving(resolve(server_flags(draft=quantized(tmp_path, "draft", config)))) == "builtin"
    assert "quantization_config" in capfd.readouterr().err


@pytest.mark.parametrize("window", [None, 7])
def test_8_bit_draft_kv_drafts(window: int | None) -> None:
    """A prefill and a decode step; the drafts are of tokens, whatever was rounded."""
    worker = filled(worker_of(window, dtype=torch.float8_e4m3fn), [9, 14])
    assert worker.drafter.groups[0].cache.kv.dtype == torch.float8_e4m3fn
    result = worker.forward_batch_generation(decode_of([9, 14]))
    assert worker.drafter.groups[0].cache.kv.float().isfinite().all()
    assert all(1 <= n <= worker.verify_block for n in result.accept_lens.tolist())
