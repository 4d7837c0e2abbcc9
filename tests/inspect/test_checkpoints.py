"""`sglang-dflash inspect` refuses weights that a server refuses, by the server's own check."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from sglang_dflash import cli
from sglang_dflash.facts.embedded import demo_pair
from tests.inspect.pairs import inspected, refusal

PAIR = demo_pair("dense")
Q = "layers.0.self_attn.q_proj.weight"


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    return Path(shutil.copytree(PAIR.draft, tmp_path / "draft"))


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return Path(shutil.copytree(PAIR.target, tmp_path / "target"))


def rewrite(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(Q), f"tensor {Q} of the draft: missing"),
        (lambda t: t.update(extra=torch.zeros(1)), "'extra'; no DFlash v1 draft has this tensor"),
        (lambda t: t.update({Q: t[Q][:-1]}), f"{Q} of the draft: [255, 192]; the config asks"),
    ],
    ids=["missing", "extra", "misshapen"],
)
def test_tensors_of_a_draft_are_checked(
    capsys: pytest.CaptureFixture[str], draft: Path, change: Any, message: str
) -> None:
    rewrite(draft, change)
    assert message in refusal(capsys, str(PAIR.target), str(draft))


@pytest.mark.parametrize("kind", ["target", "draft"])
@pytest.mark.parametrize("size", [-100, 4, 0], ids=["data", "header", "empty"])
def test_truncated_weights_are_refused(
    capsys: pytest.CaptureFixture[str], target: Path, draft: Path, kind: str, size: int
) -> None:
    file = {"target": target, "draft": draft}[kind] / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    shown = refusal(capsys, str(target), str(draft))
    assert f"{kind} checkpoint: '{file}'; truncated or damaged" in shown


def test_a_draft_of_pickles_is_refused(capsys: pytest.CaptureFixture[str], draft: Path) -> None:
    (draft / "model.safetensors").rename(draft / "pytorch_model.bin")
    shown = refusal(capsys, str(PAIR.target), str(draft))
    assert "no .safetensors file in it, only pytorch_model.bin" in shown


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
    assert "\ndraft weights: not checked, only the config" in capsys.readouterr().out


def test_tensors_of_another_head_are_not_checked(
    capsys: pytest.CaptureFixture[str], draft: Path
) -> None:
    """The server leaves them to SGLang's worker, too."""
    raw = json.loads((draft / "config.json").read_text())
    (draft / "config.json").write_text(json.dumps({**raw, "selector_rank": 8}))
    rewrite(draft, lambda t: t.update(selector=torch.zeros(1)))
    report = inspected(capsys, str(PAIR.target), str(draft))
    assert report["worker"] == "builtin"
    assert report["verdict"].startswith("served by SGLang's built-in worker, because of selector")
    assert cli.main(["inspect", str(PAIR.target), str(draft)]) == 0
    assert "\ndraft weights: not checked, SGLang's worker" in capsys.readouterr().out
