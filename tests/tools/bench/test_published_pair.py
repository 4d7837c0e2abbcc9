"""The published benchmark over Transformers: figures, and any number of ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sglang_dflash.tools.bench.published import main
from sglang_dflash.tools.bench.published_pair import PairAnswer, pair_figures, pair_lines
from sglang_dflash.tools.bench.published_settings import PublishedSettings
from sglang_dflash.tools.demo_pairs.pairs import demo_pair

PAIR = demo_pair("dense")
ASKED = [
    *("--backend", "transformers", "--model", str(PAIR.target), "--draft-model", str(PAIR.draft)),
    *("--dataset", "demo", "--max-samples", "4", "--max-new-tokens", "32"),
]


def test_figures_are_exact_counts() -> None:
    def one(kept: list[int], plain_s: float, dflash_s: float) -> PairAnswer:
        # The first token is the prefill's.
        return PairAnswer(0, 0, "", [7] * (1 + sum(kept)), kept, True, plain_s, dflash_s)

    settings = PublishedSettings(target="T", draft="D", dataset=("demo",))
    measured = [one([3, 4, 1], 0.2, 0.1), one([2], 0.4, 0.1)]
    found = pair_figures(settings, "demo", 2, 4, measured)
    # 8 and 2 tokens in 3 and 1 steps; z-lab: the mean of 8 / 3 and 2.
    assert found["acceptance_length"] == 10 / 4
    assert found["average_acceptance_length"] == pytest.approx((8 / 3 + 2) / 2)
    assert found["acceptance_length_histogram"] == [0, 0.25, 0.25, 0.25, 0.25]
    assert (found["baseline_tok_s"], found["dflash_tok_s"]) == pytest.approx((1 / 0.3, 10))
    assert found["speedup"] == pytest.approx(3) and found["speedup_range"] == [2.0, 4.0]
    assert "Decoding speedup: 3.00 (of single answers: 2.00 to 4.00)" in pair_lines(found)
    assert found["same_answers"] == found["answer_count"] == 2


def torchrun(
    size: int, out: Path, asked: list[str], **env: str
) -> subprocess.CompletedProcess[str]:
    """`torchrun --nproc_per_node=SIZE -m sglang_dflash.benchmark ...`"""
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc_per_node={size}", "-m", "sglang_dflash.benchmark", *asked]
    return subprocess.run(
        [*command, "--output-file", str(out)],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "OMP_NUM_THREADS": "1", **env},
    )


@pytest.mark.engine
def test_two_ranks_answer_as_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = tmp_path / "one.json", tmp_path / "two.json"
    assert main([*ASKED, "--output-file", str(one)]) == 0
    shown = capsys.readouterr().out
    assert "Outputs: 4 of 4 are plain decoding's" in shown
    done = torchrun(2, two, ASKED)
    assert done.returncode == 0, done.stderr[-2000:]
    # One report.
    assert done.stdout.count("DFlash throughput: ") == 1
    found: list[dict[str, Any]] = [json.loads(path.read_text()) for path in (one, two)]
    assert [result["ranks"] for result in found] == [1, 2]
    assert found[0]["answers"] == found[1]["answers"] and len(found[0]["answers"]) == 4
    assert all(len(answer["tokens"]) == 32 for answer in found[0]["answers"])
    for name in ("acceptance_length", "acceptance_length_histogram", "verify_steps"):
        assert found[0][name] == found[1][name]
    steps, tokens = found[0]["verify_steps"], found[0]["output_tokens"]
    assert found[0]["acceptance_length"] == (tokens - 4) / steps > 4


@pytest.mark.engine
def test_an_error_ends_all_ranks(tmp_path: Path) -> None:
    empty = str(tmp_path / "empty")
    caches = {"XDG_CACHE_HOME": empty, "HF_HOME": empty}
    asked = [*ASKED[:6], "--dataset", "gsm8k"]
    done = torchrun(2, tmp_path / "x", asked, **caches, HF_HUB_OFFLINE="1")
    assert done.returncode != 0
    assert "--dataset: 'gsm8k'; openai/gsm8k could not be fetched" in done.stderr


def test_sampled_answers_do_not_depend_on_the_order(tmp_path: Path) -> None:
    """A rank answers a part of the prompts, so a prompt's seed is its own."""
    file, outs = tmp_path / "own.jsonl", [tmp_path / "all.json", tmp_path / "again.json"]
    file.write_text("".join(f'{{"prompt": {json.dumps(p)}}}\n' for p in PAIR.prompts[:3]))
    asked = [*ASKED[:6], "--dataset-file", str(file), "--max-new-tokens", "8"]
    for out in outs:
        assert main([*asked, "--temperature", "1.5", "--output-file", str(out)]) == 0
    first, again = (json.loads(out.read_text()) for out in outs)
    assert first["answers"] == again["answers"] and first["same_answers"] == first["answer_count"]


@pytest.mark.parametrize(
    "changed",
    [
        ["--model", "./nonesuch"],
        ["--draft-model", "./nonesuch"],
        ["--block-size", "1"],
    ],
    ids=" ".join,
)
def test_a_pair_that_does_not_fit_is_refused(
    changed: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*ASKED, *changed]) == 1
    shown = capsys.readouterr()
    assert shown.err.startswith(f"sglang_dflash.benchmark: {changed[0]}: ") and not shown.out
