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
from sglang_dflash.drafting.options import DRAFT_KV_HEADROOM
from sglang_dflash.facts.embedded import demo_pair
from tests.inspect.pairs import PUBLISHED_PAIRS, inspected, refusal


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
    assert report["draft_kv_entries"] == int(DRAFT_KV_HEADROOM * 4 * (64 + 8))


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
    assert "TARGET: 'Qwen/Nonesuch'" in shown and "did you mean" not in shown
    assert all(published in shown for published, _ in PUBLISHED_PAIRS)
    assert "DRAFT: 'Qwen/Nonesuch'" in refusal(capsys, target, "Qwen/Nonesuch")
    assert "draft checkpoint: no config.json in" in refusal(capsys, target, str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    assert "is not valid JSON" in refusal(capsys, target, str(tmp_path))
    (tmp_path / "config.json").write_text("[]")
    assert "holds no JSON object" in refusal(capsys, target, str(tmp_path))


def test_errors_name_the_commands_own_flags(capsys: pytest.CaptureFixture[str]) -> None:
    shown = refusal(capsys, *PUBLISHED_PAIRS[2], "--window", "3")
    assert "sglang-dflash: --window: 3; smaller than the block size; give at least 16" in shown


def test_the_table_begins_with_the_verdict_and_hides_empty_rows(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = [*PUBLISHED_PAIRS[2], "--window", "1024", "--max-running-requests", "16"]
    report = inspected(capsys, *arguments)
    for flags in ([], ["--sources"]):
        assert cli.main(["inspect", *arguments, "--offline", *flags]) == 0
        shown = capsys.readouterr().out
        head, _, table = shown.partition("\n\n")
        first, weights, assumed = head.replace("\nbfloat16", " bfloat16").splitlines()
        lines = table.splitlines()
        gain = "window 1024 leaves +12.6 % KV tokens for the target"
        assert first == report["verdict"] == f"served by sglang-dflash; {gain}"
        assert weights.startswith("draft weights: not checked")
        assert assumed == report["assumptions"] and "16 running requests" in assumed
        shown = [line.split()[0] for line in lines if not line.startswith(" ")]
        known = {name for name, value in report.items() if value not in (None, 0)}
        expected = known - {"verdict", "assumptions", "warnings", "sources"}
        assert set(shown) == (expected | {"source"} if flags else expected)
        assert max(map(len, lines)) <= 120


def test_the_verdict_of_a_window_that_frees_nothing_and_of_none(
    capsys: pytest.CaptureFixture[str],
) -> None:
    pair = PUBLISHED_PAIRS[2]
    wide = inspected(capsys, *pair, "--window", "32768")["verdict"]
    assert "; window 32768 frees nothing: 48 running requests need as many" in wide
    # 20,480 of 147,456 + 20,480 bytes of a token are the draft's.
    without = inspected(capsys, *pair)["verdict"]
    assert "without --window its draft KV takes 12.2 % of the KV memory" in without
    assert "up to +13.9 % KV tokens" in without


def test_names_are_found_in_any_case(capsys: pytest.CaptureFixture[str]) -> None:
    target, draft = PUBLISHED_PAIRS[2]
    report = inspected(capsys, target.upper(), draft.lower())
    assert (report["target"], report["draft"]) == (target, draft)


@pytest.mark.parametrize("name", ["Qwen3-8B", "Qwen/Qwen3-8b-", "qwen/qwen-3-8b", "Qwen3-8"])
def test_near_names_are_suggested(capsys: pytest.CaptureFixture[str], name: str) -> None:
    shown = refusal(capsys, name, PUBLISHED_PAIRS[2][1])
    assert "did you mean 'Qwen/Qwen3-8B'" in shown and "gpt-oss" not in shown


def test_a_swapped_pair_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    target, draft = PUBLISHED_PAIRS[2]
    swapped = "is a draft; the target comes first, then the draft"
    assert f"TARGET: '{draft}' {swapped}" in refusal(capsys, draft, target)
    pair = demo_pair("dense")
    folders = str(pair.draft), str(pair.target)
    assert f"TARGET: '{folders[0]}' {swapped}" in refusal(capsys, *folders)
    shown = refusal(capsys, str(pair.target), str(pair.target))
    assert "draft checkpoint: no DFlash draft" in shown
    assert f"DRAFT: '{target}' is a target" in refusal(capsys, target, target)


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
