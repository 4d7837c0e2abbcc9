"""Result files name their command and machine, and the README's numbers are fields of theirs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests import ROOT

FILES = sorted((ROOT / "experiments/results").rglob("*.json"))
RESULTS = {path.stem: json.loads(path.read_text()) for path in FILES}
README = " ".join((ROOT / "README.md").read_text().split())
# A sentence or row of the README, the result that it tells, and the field of each number.
CLAIMS = (
    (r"float32: \*\*(\S+)x as fast as without\*\*", "demo_smollm2_cpu", "speedup"),
    (r"chats (\S+)x, code (\S+)x, edits (\S+)x", "demo_smollm2_cpu",
     "speedup_by_task.chat speedup_by_task.code speedup_by_task.edits"),
    (r"our draft: \*\*(\S+)x SGLang's worker\*\* \(mean of nine greedy workloads, (\S+)x to "
     r"(\S+)x\)\. Against no draft: (\S+)x to (\S+)x,", "bench_smollm2_h200",
     "over_builtin_geometric_mean over_builtin.edits_8 "
     "over_builtin.code_8 over_plain.chat_32 over_plain.code_1"),
    (r"32 requests, .*: \*\*(\S+)\*\* with .*, (\S+) without; SGLang's worker (\d+) "
     r"\(its default flags admit (\d+)",
     "gpu_servers_27b_defaults_h200",
     "servers.adaptive.levels.32.tokens_per_second servers.dflash.levels.32.tokens_per_second "
     "servers.builtin.levels.32.tokens_per_second servers.builtin.running_requests"),
    (r"\| (\S+)x \| `bash launch/demo\.sh --check` \|", "demo_smollm2_cpu", "speedup"),
    (r"SGLang's worker (\S+ %)\) \| (\S+ %) \| `python -m experiments target_kv_tokens` \|",
     "target_kv_tokens_cpu", "share_of_plain.builtin share_of_plain.bounded"),
    (r"\| (\S+)x \| `sglang-dflash bench --target TARGET --base-url plain=URL` \|",
     "bench_smollm2_h200", "over_builtin_geometric_mean"),
    (r"SGLang's worker, (\d+) at once: (\d+)\) "
     r"\| (\S+) \| `python -m experiments gpu_servers --target Qwen/Qwen3\.5-27B`",
     "gpu_servers_27b_defaults_h200",
     "servers.builtin.running_requests servers.builtin.levels.32.tokens_per_second "
     "servers.adaptive.levels.32.tokens_per_second"),
    (r"no draft (\S+) \(without FlashInfer", "gpu_servers_27b_h200",
     "servers.ar.levels.32.tokens_per_second"),
)  # fmt: skip


def leaves(result: Any) -> Iterator[tuple[str, Any]]:
    """The values in a result, each with the name of its field."""
    for key, value in result.items() if isinstance(result, dict) else enumerate(result):
        if isinstance(value, dict | list):
            yield from leaves(value)
        else:
            yield str(key), value


def field_of(result: Any, path: str) -> float:
    for name in path.split("."):
        result = result[name]
    return result


@pytest.mark.parametrize("result", RESULTS.values(), ids=RESULTS)
def test_a_result_has_its_command_and_machine_and_exact_outputs(result: dict[str, Any]) -> None:
    assert result["command"] and {"date", "processor", "cores"} <= set(result["hardware"])
    assert all(value is True for name, value in leaves(result) if name == "identical")


@pytest.mark.parametrize(("claim", "result", "fields"), CLAIMS, ids=[c[0][:40] for c in CLAIMS])
def test_a_number_of_the_readme_is_its_field(claim: str, result: str, fields: str) -> None:
    (shown,) = re.finditer(claim, README)
    for text, path in zip(shown.groups(), fields.split(), strict=True):
        number, _, percent = text.partition(" ")
        digits = len(number.partition(".")[2])
        value = field_of(RESULTS[result], path) * (100 if percent else 1)
        assert float(number.replace(",", "")) == pytest.approx(value, abs=0.501 * 10**-digits), path


def test_every_row_of_the_results_is_a_claim() -> None:
    """Its command is that of the result. Further claims of a row have no command."""
    table = README.partition("## Results")[2].partition(" ## ")[0]
    rows = re.findall(r"\| `([^`]+)` \|", table)
    told = {
        match[0]: result
        for claim, result, _ in CLAIMS
        for match in re.finditer(claim, table)
        if "`" in match[0]
    }
    assert rows and len(told) == len(rows)
    for row, result in told.items():
        (command,) = re.findall(r"`([^`]+)`", row)
        assert command in rows
        assert f"{RESULTS[result]['command']} ".startswith(f"{command} ")
