"""Quantized drafts: every layout gives the weights that its exporter meant, bit for bit."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang_dflash.checkpoint.draft_config import DraftConfig
from sglang_dflash.checkpoint.quantization import FORMATS
from sglang_dflash.checkpoint.tensors import check_weights
from sglang_dflash.common.errors import ConfigError
from sglang_dflash.drafting.dequantize import WEIGHTS
from sglang_dflash.drafting.weights import check_new, load_model, read_tensors, save_model
from tests.conftest import random_model, raw_config, rewrite, with_own
from tests.drafting.test_weights import Ranks
from tests.quantized_checkpoints import EXPORTERS

DFLASH2 = with_own(selector_rank=16, selector_top_k=5, conv_kernel_size=2, conv_group_size=4)
# compressed-tensors rounds these values to bfloat16.
ROUNDED = ("NVFP4",)


@pytest.fixture(params=[{}, DFLASH2], ids=["dflash", "dflash2"])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return draft(tmp_path / "source", **request.param)


def draft(folder: Path, **changes: Any) -> Path:
    raw = raw_config(**changes)
    save_model(random_model(raw), raw, folder, torch.float32)
    return folder


def state(folder: Path, dtype: torch.dtype = torch.float32, **how: Any) -> dict[str, torch.Tensor]:
    return load_model(folder, dtype=dtype, **how).state_dict()


def assert_same(folder: Path, plain: Path, dtype: torch.dtype, **how: Any) -> None:
    got, expected = state(folder, dtype, **how), state(plain, dtype, **how)
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(got[name], tensor), name


def test_every_format_has_its_values() -> None:
    assert {row.name for row in FORMATS} == WEIGHTS.keys()


@pytest.mark.parametrize("name", EXPORTERS)
def test_a_quantized_draft_is_that_of_its_values(name: str, source: Path, tmp_path: Path) -> None:
    folder, plain = tmp_path / "quantized", tmp_path / "plain"
    EXPORTERS[name].write(source, folder, plain)
    check_weights(DraftConfig.from_pretrained(folder), folder)
    for dtype in (torch.bfloat16,) if name in ROUNDED else (torch.float32, torch.bfloat16):
        assert_same(folder, plain, dtype)
    lossy, exact = state(folder), state(source)
    changed = [key for key in exact if not torch.equal(lossy[key], exact[key])]
    assert any("qkv_proj" in key for key in changed) and not any("norm" in key for key in changed)


@pytest.mark.parametrize("name", ["W4A16-zero-points", "ModelOpt-NVFP4", "AWQ"])
def test_ranks_share_a_quantized_draft(name: str, tmp_path: Path) -> None:
    folder, plain = tmp_path / "quantized", tmp_path / "plain"
    EXPORTERS[name].write(draft(tmp_path / "source", **DFLASH2), folder, plain)
    Ranks(2).run(lambda tp: assert_same(folder, plain, torch.bfloat16, tp=tp))


def test_modules_that_are_left_out_stay_as_they_are(tmp_path: Path) -> None:
    """Their tensors tell: names in an `ignore` list are patterns of the exporter's own model."""
    folder, plain, source = tmp_path / "quantized", tmp_path / "plain", draft(tmp_path / "source")
    replace(EXPORTERS["AWQ"], keep=("fc", "o_proj")).write(source, folder, plain)
    assert_same(folder, plain, torch.float32)
    assert torch.equal(state(folder)["fc.weight"], state(source)["fc.weight"])


@pytest.mark.parametrize("name", [None, "W4A16", "ModelOpt-NVFP4", "GPTQ"])
def test_fused_modules_are_taken_apart(name: str | None, tmp_path: Path) -> None:
    """SGLang's worker takes `qkv_proj` and `gate_up_proj`, too."""
    folder, plain, source = tmp_path / "quantized", tmp_path / "plain", draft(tmp_path / "source")
    expected = state(source)

    def fuse(tensors: dict[str, torch.Tensor]) -> None:
        for i in range(3):
            for block, whole, parts in (("self_attn", "qkv", "qkv"), ("mlp", "gate_up", None)):
                names = [f"layers.{i}.{block}.{own}_proj.weight" for own in parts or ("gate", "up")]
                rows = torch.cat([tensors.pop(own) for own in names])
                tensors[f"layers.{i}.{block}.{whole}_proj.weight"] = rows

    rewrite(source, fuse)
    if name is None:
        check_weights(DraftConfig.from_pretrained(source), source)
        assert all(torch.equal(own, expected[key]) for key, own in state(source).items())
        return
    EXPORTERS[name].write(source, folder, plain)
    check_weights(DraftConfig.from_pretrained(folder), folder)
    assert_same(folder, plain, torch.float32)


def test_one_line_tells_what_the_weights_take(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, plain = tmp_path / "quantized", tmp_path / "plain"
    EXPORTERS["W4A16"].write(draft(tmp_path / "source"), folder, plain)
    with caplog.at_level(logging.INFO):
        model = load_model(folder, dtype=torch.bfloat16)
        load_model(plain, dtype=torch.bfloat16)
        load_model(folder, dtype=torch.bfloat16, dummy=True)
    (line,) = [record.getMessage() for record in caplog.records if "dequant" in record.message]
    size = sum(own.numel() for own in model.parameters()) * 2 / 2**30

    assert line.startswith("sglang-dflash: 22 modules of the draft are quantized, compressed-tens")
    assert (
        f"pack-quantized (4 bits), and were dequantized: it takes {size:.3f} GiB, bfloat16" in line
    )


def test_a_draft_that_is_only_said_to_be_quantized(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = draft(tmp_path / "source")
    expected = state(source)
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = dict(EXPORTERS["FP8"].config)
    (source / "config.json").write_text(json.dumps(config))
    assert all(torch.equal(own, expected[name]) for name, own in state(source).items())
    assert "float-quantized (8 bits): no tensor of it is" in caplog.text


Q = "layers.1.self_attn.q_proj"
BROKEN: dict[str, tuple[str, Any, str]] = {
    "no scales": ("W4A16", lambda t: t.pop(f"{Q}.weight_scale"), f"{Q}.weight_scale.*missing"),
    "no zero points": ("AWQ", lambda t: t.pop(f"{Q}.qzeros"), f"{Q}.qzeros.*missing"),
    "no codes": ("GPTQ", lambda t: t.pop(f"{Q}.qweight"), f"{Q}.weight of the draft: missing"),
    "other rows": (
        "ModelOpt-NVFP4", lambda t: t.update({f"{Q}.weight": t[f"{Q}.weight"][:-1]}),
        f"{Q}.weight of the draft: .*asks for",
    ),
    "other scales": (
        "ModelOpt-NVFP4", lambda t: t.update({f"{Q}.weight_scale": t[f"{Q}.weight_scale"][1:]}),
        f"{Q}.weight of the draft: its scales do not fit",
    ),
    "a list of codes": (
        "FP8", lambda t: t.update({f"{Q}.weight": t[f"{Q}.weight"].flatten()}), "a matrix is",
    ),
    "a scale of NaN": (
        "ModelOpt-FP8", lambda t: t[f"{Q}.weight_scale"].fill_(torch.nan), "1 of 1 values are NaN",
    ),
    "FP8 scales of NaN": (
        "NVFP4", lambda t: t[f"{Q}.weight_scale"].view(torch.uint8).fill_(0x7F), "values are NaN",
    ),
    "a weight of zeros": (
        "NVFP4", lambda t: t[f"{Q}.weight_packed"].zero_(), f"{Q}.weight_packed.* all zeros",
    ),
    "another use": (
        "AWQ", lambda t: t.update({f"{Q}.pre_quant_scale": torch.ones(32)}), f"{Q}.pre_quant_scale",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_a_damaged_export_is_refused_by_name(case: str, tmp_path: Path) -> None:
    name, damage, message = BROKEN[case]
    folder = tmp_path / "quantized"
    EXPORTERS[name].write(draft(tmp_path / "source"), folder, tmp_path / "plain")
    rewrite(folder, damage)
    with pytest.raises(ConfigError, match=message):
        load_model(folder, dtype=torch.float32)


@pytest.mark.parametrize("name", ["W4A16", "ModelOpt-FP8", "AWQ"])
def test_new_weights_of_a_served_draft_are_plain(name: str, tmp_path: Path) -> None:
    """Nothing tells how sent tensors would be quantized. A folder is read as at start."""
    folder, plain = tmp_path / "quantized", tmp_path / "plain"
    EXPORTERS[name].write(draft(tmp_path / "source"), folder, plain)
    model = load_model(folder, dtype=torch.float32)
    check_new(model, read_tensors(plain))
    quantized = {own: tensor for own, tensor in read_tensors(folder).items() if own[:3] == "fc."}
    fused = {"layers.0.self_attn.qkv_proj.weight": torch.randn(128, 32)}
    for tensors in (quantized, fused):
        with pytest.raises(ConfigError, match=r"no draft of this config|one of BF16"):
            check_new(model, tensors)
