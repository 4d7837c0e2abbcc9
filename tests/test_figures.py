"""The figures in README and docs are those of the result files, and the results hold."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tools.figures import PAGES, RESULTS, TABLES, page, read


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_the_figures_are_current(path: Path) -> None:
    assert path.read_text() == page(path.read_text()), "run python tools/figures.py"


def test_a_changed_figure_is_noticed() -> None:
    text = PAGES[0].read_text()
    changed = text.replace(str(read("demo_cpu")["speedup"]), "9.99")
    assert changed != text and page(changed) == text


def test_every_table_is_shown_somewhere() -> None:
    shown = {
        name for path in PAGES for name in re.findall(r"<!-- figures (\w+) -->", path.read_text())
    }
    assert shown == set(TABLES)


def test_results_give_date_machine_and_command() -> None:
    for file in RESULTS.glob("*.json"):
        result = json.loads(file.read_text())
        assert {"date", "processor", "cores"} <= set(result["hardware"]), file.name
        assert "command" in result, file.name


def test_outputs_are_plain_decodings_in_every_result() -> None:
    assert read("demo_code_cpu")["identical"] is True
    assert read("demo_cpu")["identical"] is True
    assert read("demo_hybrid_cpu")["identical"] is True
    comparison = read("bench_dense_cpu/results")
    assert comparison["identical"] is True
    assert comparison["arms"] == ["ar", "dflash", "builtin"]
    assert (RESULTS / "bench_dense_cpu/throughput.png").is_file()
    assert all(arm["chats"]["identical"] for arm in read("multi_turn_cpu")["arms"].values())


def test_the_results_say_what_the_docs_claim() -> None:
    """The claims in words next to the tables."""
    chats = {name: arm["chats"] for name, arm in read("multi_turn_cpu")["arms"].items()}
    assert chats["default"]["acceptance_length"] > 0.98 * chats["unbounded"]["acceptance_length"]
    hybrid = read("demo_hybrid_cpu")
    assert hybrid["acceptance_length"] >= 2.5 and hybrid["speedup"] > 1
    replay, memory = read("worker_overhead_hybrid_cpu"), read("recurrent_memory_cpu")
    assert all(replay[f"concurrency_{n}"]["step_time_ratio"] <= 1 for n in (1, 8))
    assert memory["scratch_ratio"] <= 0.1
    given, most = memory["states_given"], memory["most_requests"]
    assert given["replay"]["target_kv_tokens"] > given["snapshot"]["target_kv_tokens"]
    assert most["replay"]["running_requests"] > most["snapshot"]["running_requests"]
    context = read("context_length")["acceptance_length"]
    assert round(context["1024"]["window 512"], 2) == 2.0
    assert round(context["1024"]["no window"], 2) == 1.26
    beyond = [v for n, row in context.items() if int(n) >= 2048 for v in row.values()]
    assert min(beyond) >= 1.18 and max(beyond) <= 1.4
