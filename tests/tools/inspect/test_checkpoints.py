"""Checks of weights by `sglang-dflash inspect`: the target's files, and whether a draft's are.
(Broken drafts: tests/serving/start/test_broken_drafts.py.)"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from sglang_dflash.tools import cli
from sglang_dflash.tools.demo_pairs.pairs import demo_pair
from tests.quantized_checkpoints import EXPORTERS
from tests.tools.inspect.pairs import inspected, refusal

PAIR = demo_pair("dense")


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    return Path(shutil.copytree(PAIR.draft, tmp_path / "draft"))


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return Path(shutil.copytree(PAIR.target, tmp_path / "target"))


@pytest.mark.parametrize("size", [-100, 4, 0], ids=["data", "header", "empty"])
def test_truncated_weights_of_the_target_are_refused(
    capsys: pytest.CaptureFixture[str], target: Path, size: int
) -> None:
    file = target / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    shown = refusal(capsys, str(target), str(PAIR.draft))
    assert f"target checkpoint: '{file}'; truncated or damaged" in shown


def test_a_missing_shard_of_the_target_is_refused(
    capsys: pytest.CaptureFixture[str], target: Path
) -> None:
    (target / "model.safetensors").rename(target / "model-00001-of-00002.safetensors")
    shards = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    index = {"metadata": {"total_size": 1}, "weight_map": dict(zip("ab", shards, strict=True))}
    (target / "model.safetensors.index.json").write_text(json.dumps(index))
    shown = refusal(capsys, str(target), str(PAIR.draft))
    assert f"model.safetensors.index.json names '{shards[1]}'; download" in shown


def test_the_verdict_tells_whether_weights_were_checked(
    capsys: pytest.CaptureFixture[str], draft: Path
) -> None:
    count = len(load_file(draft / "model.safetensors"))
    assert inspected(capsys, str(PAIR.target), str(draft))["draft_tensors"] == count
    assert cli.main(["inspect", str(PAIR.target), str(draft)]) == 0
    assert f"\ndraft weights: {count} tensors" in capsys.readouterr().out
    (draft / "model.safetensors").unlink()
    assert inspected(capsys, str(PAIR.target), str(draft))["draft_tensors"] is None
    assert cli.main(["inspect", str(PAIR.target), str(draft)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert " draft weights: not checked, only the config" in shown
    assert f"config only: {draft} has no weights" in shown


def test_tensors_of_another_head_are_not_checked(
    capsys: pytest.CaptureFixture[str], draft: Path
) -> None:
    """The server leaves them to SGLang's worker, too."""
    raw = json.loads((draft / "config.json").read_text())
    (draft / "config.json").write_text(json.dumps({**raw, "swiglu_limit": 7.0}))
    save_file({"selector": torch.zeros(1)}, draft / "model.safetensors")
    report = inspected(capsys, str(PAIR.target), str(draft))
    assert report["worker"] == "builtin"
    assert report["verdict"].startswith("served by SGLang's built-in worker, because of swiglu")
    assert cli.main(["inspect", str(PAIR.target), str(draft)]) == 0
    assert "\ndraft weights: not checked, SGLang's worker" in capsys.readouterr().out


@pytest.mark.parametrize("name", EXPORTERS)
def test_a_quantized_draft_counts_as_it_is_served(
    name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder, plain = tmp_path / "quantized", tmp_path / "plain"
    EXPORTERS[name].write(PAIR.draft, folder, plain)
    found, twin = (inspected(capsys, str(PAIR.target), str(path)) for path in (folder, plain))
    assert (found["worker"], found["draft_values"]) == ("sglang-dflash", "finite")
    assert found["draft_quantization"].endswith("bits), dequantized when it is loaded")
    assert twin["draft_quantization"] is None
    for fact in ("draft_weight_bytes", "target_tokens", "memory_bytes"):
        assert found[fact] == twin[fact]
    # Of a precision that is not the target's.
    assert len(found["warnings"]) == len(twin["warnings"]) + 1


def test_kv_has_the_dtype_that_the_targets_files_ask_for(
    capsys: pytest.CaptureFixture[str], target: Path
) -> None:
    """`inspect` counts the target's K/V in 8 bits and draft K/V in 16, as a server keeps them."""
    pair = str(target), str(PAIR.draft)
    flags = ["--kv-dtype", "fp8_e4m3", "--draft-kv-dtype", "bfloat16"]
    plain, in_8_bits = inspected(capsys, *pair), inspected(capsys, *pair, *flags)
    section = {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8"}
    (target / "hf_quant_config.json").write_text(json.dumps({"quantization": section}))
    assert inspected(capsys, *pair) == in_8_bits
    for flag, expected in (("fp8_e4m3", in_8_bits), ("bfloat16", plain)):
        found = inspected(capsys, *pair, "--kv-dtype", flag)["target_kv_bytes_per_token"]
        assert found == expected["target_kv_bytes_per_token"]


def test_a_target_in_fp8_may_be_asked_for_in_fp8(
    capsys: pytest.CaptureFixture[str], target: Path
) -> None:
    """Published commands say so; a server loads the weights as they are."""
    config, fp8 = json.loads((target / "config.json").read_text()), ("--quantization", "fp8")
    pair = str(target), str(PAIR.draft)
    for method in ("fp8", "compressed-tensors"):
        section = {"quantization_config": {"quant_method": method}}
        (target / "config.json").write_text(json.dumps({**config, **section}))
        if method == "fp8":
            assert inspected(capsys, *pair, *fp8) == inspected(capsys, *pair)
    assert "are quantized already; leave it out" in refusal(capsys, *pair, *fp8)
