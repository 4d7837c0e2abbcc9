"""What a machine can check of the README: commands parse, files exist, figures are current."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def commands(start: str) -> list[list[str]]:
    """The README's indented commands that begin with `start`, continuation lines joined."""
    joined = README.replace("\\\n", " ")
    return [
        shlex.split(line, comments=True)
        for line in re.findall(r"^    (.*)$", joined, re.M)
        if line.startswith(start)
    ]


def test_published_launch_commands_parse_as_printed() -> None:
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.server_args import prepare_server_args

    found = [c for c in commands("python -m sglang.launch_server") if "..." not in c]
    assert len(found) >= 2
    for command in found:
        args = prepare_server_args(command[3:])
        assert args.speculative_algorithm == "DFLASH" and args.speculative_draft_model_path


@pytest.mark.parametrize("command", commands("bash"), ids=lambda c: c[1])
def test_scripts_exist_and_are_valid(command: list[str]) -> None:
    script = ROOT / command[1]
    assert script.is_file()
    subprocess.run(["bash", "-n", str(script)], check=True)


@pytest.mark.skipif(
    not (ROOT / ".venv").exists(),
    reason="set up without launch/test.sh: the demo would make its own .venv",
)
def test_the_demo_script_hands_its_arguments_on() -> None:
    shown = subprocess.run(
        ["bash", str(ROOT / "launch/demo.sh"), "--help"],
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    ).stdout
    assert "--check" in shown and "--model" in shown


def test_the_prompt_shown_is_one_that_the_pair_drafts_well(
    capsys: pytest.CaptureFixture[str],
) -> None:
    from sglang_dflash import cli

    (command,) = commands("sglang-dflash generate")
    assert cli.main([*command[1:], "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["acceptance_length"] > 4


def test_links_lead_somewhere() -> None:
    for link in re.findall(r"\]\((?!https?:)([^)]+)\)", README):
        assert (ROOT / link).exists(), link


@pytest.mark.engine
def test_every_flag_of_the_table_is_a_flag() -> None:
    shown = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "sglang.launch_server", "--help"],
        capture_output=True,
        text=True,
        check=True,
        timeout=240,
    ).stdout
    for flag in set(re.findall(r"`(--[a-z-]+)", README)):
        assert (
            flag in shown
            or f"{flag} " in (ROOT / "sglang_dflash/bench/demo.py").read_text()
            or flag == "--check"
        ), flag


def test_results_say_when_where_and_how() -> None:
    for file in (ROOT / "benchmarks/results").glob("*.json"):
        result = json.loads(file.read_text())
        assert {"date", "processor", "cores"} <= set(result["hardware"]) and "command" in result, (
            file.name
        )


def test_the_readmes_figures_are_those_of_the_results() -> None:
    demo = json.loads((ROOT / "benchmarks/results/demo_cpu.json").read_text())
    overhead = json.loads((ROOT / "benchmarks/results/worker_overhead_cpu.json").read_text())
    assert demo["identical"] is True
    figures = [demo["speedup"], demo["acceptance_length"], demo["ar_tok_s"], demo["dflash_tok_s"]]
    for concurrency in ("concurrency_1", "concurrency_8"):
        row = overhead[concurrency]
        figures += [
            row["step_time_ratio"],
            row["throughput_ratio"],
            row["ours"]["step_ms"],
            row["builtin"]["tokens_per_second"],
        ]
    for figure in figures:
        assert str(figure) in README, figure


def test_demo_models_command_prints_two_directories() -> None:
    from sglang_dflash import cli

    done = subprocess.run(
        [sys.executable, "-m", "sglang_dflash.cli", "demo-models", "dense"],
        capture_output=True,
        text=True,
        check=True,
    )
    target, draft = done.stdout.splitlines()
    assert (Path(target) / "model.safetensors").is_file() and (
        Path(draft) / "config.json"
    ).is_file()
    assert cli.main(["demo-models", "nonesuch"]) == 1


def test_no_machine_path_and_no_registry_host_is_committed() -> None:
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    for name in tracked:
        if (
            name.endswith((".safetensors", ".png", "tokenizer.json", "prompts.json"))
            or name == "tests/test_readme.py"
        ):
            continue
        text = (ROOT / name).read_text()
        assert not re.search(
            r"(pypi\.org|files\.pythonhosted|registry\.npmjs|/home/\w|/root/)", text
        ), name


def test_the_readmes_draft_kv_figures_are_those_of_the_results() -> None:
    def read(name: str) -> dict:
        return json.loads((ROOT / f"benchmarks/results/{name}.json").read_text())

    chats = {name: arm["chats"] for name, arm in read("multi_turn_cpu")["arms"].items()}
    assert all(arm["identical"] for arm in chats.values())
    assert chats["default"]["acceptance_length"] > 0.98 * chats["unbounded"]["acceptance_length"]
    figures = [chats[name]["acceptance_length"] for name in ("unbounded", "default", "tenth")]
    long, kv, wait = read("long_context_cpu"), read("target_kv_tokens_cpu"), read("admission_cpu")
    figures += [
        long["draft_side_step"]["ratio"],
        long["prefill"]["ratio"],
        wait["first_token_ratio"],
        wait["throughput_ratio"],
    ]
    figures += [kv["share_of_plain"][name] for name in ("bounded", "per_target_token", "builtin")]
    figures += [
        share
        for shares in read("draft_kv_headroom")["found_share"].values()
        for share in shares[3:]
    ]
    for figure in figures:
        assert str(figure) in README, figure


def test_the_readmes_comparison_is_the_committed_one() -> None:
    folder = ROOT / "benchmarks/results/bench_dense_cpu"
    result = json.loads((folder / "results.json").read_text())
    assert (
        result["identical"] is True
        and result["arms"] == ["ar", "dflash", "builtin"]
        and (folder / "throughput.png").is_file()
    )
    assert f"`{result['command']}`" in README
    for dataset in result["prompts"]:
        for arm in result["arms"]:
            rows = [row for row in result["rows"] if (row["dataset"], row["arm"]) == (dataset, arm)]
            cells = " | ".join(f"{row['output_tok_s']} ({row['ratio']}x)" for row in rows)
            assert (
                f"| {dataset}, {arm} | {cells} | {rows[0]['acceptance_length'] or '-'} |" in README
            )


def test_the_readmes_hybrid_figures_are_those_of_the_results() -> None:
    demo, overhead, memory = (
        json.loads((ROOT / f"benchmarks/results/{name}_cpu.json").read_text())
        for name in ("demo_hybrid", "worker_overhead_hybrid", "recurrent_memory")
    )
    assert demo["identical"] is True and demo["acceptance_length"] >= 2.5 and demo["speedup"] > 1
    assert memory["scratch_ratio"] <= 0.1
    figures = [demo[key] for key in ("acceptance_length", "ar_tok_s", "dflash_tok_s", "speedup")]
    for concurrency in ("concurrency_1", "concurrency_8"):
        row = overhead[concurrency]
        assert row["step_time_ratio"] <= 1
        figures += [row["step_time_ratio"], row["ours"]["step_ms"], row["snapshot"]["step_ms"]]
    given, most = memory["states_given"], memory["most_requests"]
    assert given["replay"]["target_kv_tokens"] > given["snapshot"]["target_kv_tokens"]
    assert most["replay"]["running_requests"] > most["snapshot"]["running_requests"]
    figures += [given[arm]["target_kv_tokens"] for arm in given] + [
        most[arm]["running_requests"] for arm in most
    ]
    figures += [given[arm]["scratch_bytes_per_request"] for arm in ("replay", "snapshot")]
    for figure in figures:
        assert str(figure) in README, figure
