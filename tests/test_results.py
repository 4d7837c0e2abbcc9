"""Result files name their command and machine, and the README's results are theirs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests import ROOT

FILES = sorted((ROOT / "experiments/results").rglob("*.json"))
RESULTS = {path.stem: json.loads(path.read_text()) for path in FILES}
ROWS = re.findall(
    r"^\| (.+) \| (.+) \| `(.+)` \|$",
    (ROOT / "README.md").read_text().partition("## Results")[2].partition("\n## ")[0],
    re.M,
)


def leaves(of: Any) -> Iterator[tuple[str, Any]]:
    """The values in a result, each with the name of its field."""
    for key, value in of.items() if isinstance(of, dict) else enumerate(of):
        if isinstance(value, dict | list):
            yield from leaves(value)
        else:
            yield str(key), value


@pytest.mark.parametrize("result", RESULTS.values(), ids=RESULTS)
def test_a_result_has_its_command_and_machine_and_exact_outputs(result: dict[str, Any]) -> None:
    assert result["command"] and {"date", "processor", "cores"} <= set(result["hardware"])
    assert all(value is True for name, value in leaves(result) if name == "identical")


@pytest.mark.parametrize("what, shown, command", ROWS, ids=[what[:40] for what, *_ in ROWS])
def test_the_readmes_numbers_are_those_of_the_command(what: str, shown: str, command: str) -> None:
    (result,) = [r for r in RESULTS.values() if f"{r['command']} ".startswith(f"{command} ")]
    values = [value for _, value in leaves(result) if isinstance(value, float)]
    for number in re.findall(r"\d+\.\d+", shown):
        digits = len(number.partition(".")[2])
        found = {round(v, digits) for v in values} | {round(100 * v, digits) for v in values}
        assert float(number) in found, f"{what}: {number}"


def test_the_readme_shows_results() -> None:
    assert len(ROWS) == 4
