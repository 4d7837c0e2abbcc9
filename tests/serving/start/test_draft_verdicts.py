"""Damaged drafts, drawn at random: `inspect` and the launcher of a server give the same verdict.
Only the launcher asks SGLang and Transformers whether they can read fields that we do not.

tests/engine/test_refused_starts.py starts servers with those that are accepted.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sglang_dflash.common.errors import ConfigError
from sglang_dflash.tools import cli
from tests.broken_drafts import PAIR, WEIGHTS, server_flags
from tests.checkpoint.test_fuzz import KEYS as DRAFT_KEYS
from tests.conftest import FUZZ

DRAFTS = 60
VALUES: tuple[Any, ...] = (
    None, [], {}, "", "x", -1, 0, 1.5, 1e300, True, [1], {"a": None}, {"rope_type": "default"},
    "qwen3", "llama", ["DFlashDraftModel"], "bfloat16", {"quant_method": "fp8"}, 2**70, "\ud800",
)  # fmt: skip
# What configs of drafts have, a field of another model, and none.
KEYS = sorted({*DRAFT_KEYS, "vision_config"})
# What a folder may hold beside config.json.
FILES = (
    "adapter_config.json", "config.json", "generation_config.json", "hf_quant_config.json",
    "model.safetensors.index.json", "params.json", "tokenizer_config.json", WEIGHTS,
)  # fmt: skip
CONTENTS = (b"", b"{", b"[]", b"{}", b"null", b'{"quantization": {}}', b'{"a": 1}', b"\xff")


def damage(folder: Path, chance: random.Random) -> str:
    """Change one to three fields, or put something else in place of a file."""
    file = folder / chance.choice(FILES)
    if chance.random() < 0.3:
        file.unlink(missing_ok=True)
        kind = chance.choice(("content", "content", "folder", "pipe", "gone"))
        if kind == "content":
            content = chance.choice(CONTENTS)
            file.write_bytes(content)
            return f"{file.name} {content!r}"
        {"folder": Path.mkdir, "pipe": os.mkfifo, "gone": lambda _: None}[kind](file)
        return f"{file.name} {kind}"
    config = folder / "config.json"
    raw = json.loads(config.read_text())
    changes: dict[str, Any] = {}
    for _ in range(chance.randint(1, 3)):
        if chance.random() < 0.3:
            own = changes.setdefault("dflash_config", dict(raw["dflash_config"]))
            if isinstance(own, dict):
                own[chance.choice(KEYS)] = chance.choice(VALUES)
            continue
        changes[chance.choice([*raw, *KEYS])] = chance.choice(VALUES)
    config.write_text(json.dumps({**raw, **changes}))
    return str(changes)


def damaged(number: int, parent: Path) -> tuple[Path, str]:
    """A damaged copy of the demo draft, the same for equal numbers, and what was done to it."""
    folder = parent / f"{number}"
    folder.mkdir()
    for file in PAIR.draft.iterdir():
        # Weights are linked, config.json is not written through.
        place = folder / file.name
        shutil.copy(file, place) if file.suffix == ".json" else place.symlink_to(file)
    return folder, damage(folder, random.Random(number))


def test_inspect_and_the_launcher_agree(
    resolve: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    verdicts, wrong = Counter[str](), []
    for number in range(DRAFTS * FUZZ):
        folder, what = damaged(number, tmp_path)
        status = cli.main(["inspect", str(PAIR.target), str(folder), "--offline"])
        shown = capsys.readouterr()
        try:
            resolve(server_flags(draft=folder))
            by_launcher = "served"
        except ConfigError as error:
            by_launcher = "refused"
            only_theirs = "SGLang or Transformers cannot read it" in str(error)
            assert "\n" not in str(error) and len(str(error)) < 700
        by_inspect = "refused" if status else "served"
        if by_launcher == "refused" and (only_theirs or "config only" in shown.out):
            # Of a folder without weights, a server refuses what `inspect` has said it did not see.
            by_inspect = "refused"
        verdicts[by_launcher] += 1
        if by_inspect != by_launcher:
            wrong.append(
                f"{what}: inspect {by_inspect}, launcher {by_launcher}: {shown.err[-300:]}"
            )
        shutil.rmtree(folder)
    assert not wrong, "\n".join(wrong)
    assert min(verdicts["served"], verdicts["refused"]) > len(verdicts), verdicts
