"""`python -m experiments prompts` on made-up packages."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from experiments.prompts import GSM8K, HUMAN_EVAL, Options, run
from sglang_dflash.common.errors import ConfigError
from sglang_dflash.tools.bench.datasets import from_file

FUNCTION = {
    "prompt": 'def twice(x):\n    """Double it."""\n',
    "entry_point": "twice",
    "canonical_solution": "    return 2 * x\n",
}


def test_each_task_is_a_file_that_bench_reads(tmp_path: Path) -> None:
    for name, raw in (
        (HUMAN_EVAL, gzip.compress(json.dumps(FUNCTION).encode())),
        (GSM8K, b'{"prompt": "1 + 1?"}\n\n{"prompt": "2 + 2?"}\n'),
    ):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_bytes(raw)
    out = tmp_path / "out"
    found = run(Options(packages=str(tmp_path), folder=str(out)))
    assert found["prompts"] == {"humaneval": 1, "edits": 1, "gsm8k": 2}
    asked = {name: from_file(out / f"{name}.jsonl") for name in found["prompts"]}
    assert all(len(prompt.turns) == 1 for prompts in asked.values() for prompt in prompts)
    assert asked["humaneval"][0].turns[0].endswith('"""Double it."""\n```')
    (edit,) = asked["edits"][0].turns
    assert "`twice` to `solve`" in edit and "    return 2 * x\n```" in edit
    assert asked["gsm8k"][1].turns[0].startswith("2 + 2?\n\nReason step by step")


def test_what_is_not_unpacked_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unpack both packages there"):
        run(Options(packages=str(tmp_path)))
