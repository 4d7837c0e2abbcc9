"""Tokens of a checkpoint's tokenizer, given other texts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path


def name_tokens(folder: Path, texts: Mapping[int, str], special: bool = False) -> None:
    """Let `tokenizer.json` read and write these tokens as these texts, and never in parts."""
    file = folder / "tokenizer.json"
    raw = json.loads(file.read_text())
    model, given = raw["model"], raw["added_tokens"][0]
    old = {piece for piece, token in model["vocab"].items() if token in texts}
    pairs = [pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"]]
    model["merges"] = [[a, b] for a, b in pairs if not {a, b, a + b} & old]
    kept = {piece: token for piece, token in model["vocab"].items() if piece not in old}
    model["vocab"] = {**kept, **{text: token for token, text in texts.items()}}
    raw["added_tokens"] += [
        {**given, "id": token, "content": text, "special": special} for token, text in texts.items()
    ]
    file.write_text(json.dumps(raw))
