"""`sglang-dflash inspect`: where its facts come from, what it prints and what it refuses."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors import safe_open

from sglang_dflash import cli
from sglang_dflash.checkpoint.embedded import demo_pair
from sglang_dflash.core.options import DRAFT_KV_HEADROOM
from tests.inspect_pair.pairs import PUBLISHED_PAIRS, inspected, refusal


def test_the_demo_pair_weighs_what_its_files_hold(capsys: pytest.CaptureFixture[str]) -> None:
    pair = demo_pair("dense")
    flags = ["--window", "64", "--max-running-requests", "4"]
    report = inspected(capsys, str(pair.target), str(pair.draft), *flags)
    with safe_open(pair.draft / "model.safetensors", framework="pt") as opened:
        tensors = [opened.get_tensor(name) for name in opened.keys()]  # noqa: SIM118 - not iterable
    assert report["draft_weight_bytes"] == sum(tensor.nbytes for tensor in tensors)
    assert report["target_weight_bytes"] == (pair.target / "model.safetensors").stat().st_size
    assert report["target_kv_bytes_per_token"] == 6 * 2 * 2 * 64 * 2
    assert report["draft_kv_bytes_per_token"] == 3 * 2 * 2 * 64 * 2
    assert (report["worker"], report["worker_reason"]) == ("sglang-dflash", None)
    assert report["block_size"] == 8
    assert report["draft_kv_slots"] == int(DRAFT_KV_HEADROOM * 4 * (64 + 8))


def test_a_pair_that_does_not_fit_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pair = demo_pair("dense")
    shutil.copytree(pair.draft, tmp_path / "draft")
    config = json.loads((tmp_path / "draft/config.json").read_text())
    (tmp_path / "draft/config.json").write_text(json.dumps({**config, "hidden_size": 256}))
    assert "hidden_size: the draft's is 256, the target's 192" in refusal(
        capsys, str(pair.target), str(tmp_path / "draft")
    )


def test_what_cannot_be_read_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    target, draft = PUBLISHED_PAIRS[0]
    shown = refusal(capsys, "Qwen/Nonesuch", draft)
    assert "TARGET: 'Qwen/Nonesuch'" in shown
    assert all(published in shown for published, _ in PUBLISHED_PAIRS)
    assert "DRAFT: 'Qwen/Nonesuch'" in refusal(capsys, target, "Qwen/Nonesuch")
    assert "DRAFT: no config.json in" in refusal(capsys, target, str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    assert "is not valid JSON" in refusal(capsys, target, str(tmp_path))
    (tmp_path / "config.json").write_text("[]")
    assert "holds no JSON object" in refusal(capsys, target, str(tmp_path))


def test_errors_name_the_commands_own_flags(capsys: pytest.CaptureFixture[str]) -> None:
    shown = refusal(capsys, *PUBLISHED_PAIRS[2], "--window", "3")
    assert "sglang-dflash: --window: 3 is smaller than the block size 16" in shown


def test_the_table_shows_every_fact(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [*PUBLISHED_PAIRS[2], "--window", "1024"]
    report = inspected(capsys, *arguments)
    assert cli.main(["inspect", *arguments, "--offline"]) == 0
    lines = capsys.readouterr().out.splitlines()
    shown = {line.split()[0] for line in lines if not line.startswith(" ")}
    assert shown == {*report, "source"} - {"sources"}
    assert max(map(len, lines)) <= 120


def test_help_imports_no_engine() -> None:
    code = (
        "import sys, contextlib, io\n"
        "from sglang_dflash.cli import main\n"
        "for argv in (['--help'], ['inspect', '--help']):\n"
        "    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):\n"
        "        main(argv)\n"
        "pair = ['Qwen/Qwen3-8B', 'z-lab/Qwen3-8B-DFlash-b16']\n"
        "assert main(['inspect', *pair, '--offline']) == 0\n"
        "assert not {'torch', 'sglang', 'transformers', 'huggingface_hub'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
