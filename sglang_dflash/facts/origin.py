"""The draft that is published for a target, by the target's name or by what its files say of its
origin. No torch."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from sglang_dflash.facts.errors import ConfigError
from sglang_dflash.facts.fields import read_json_object
from sglang_dflash.facts.hub import cached_config
from sglang_dflash.facts.published import published_pairs

# What the name of a quantized checkpoint has behind that of the model.
_PRECISIONS = (
    r"(?:[-_.](?:bf16|fp16|fp8|fp4|nf4|int8|int4|nvfp4|mxfp4|mxfp8|[48]-?bit|w\d+a\d+|w4afp8|awq"
    r"|gptq|bnb|autoround|dynamic|block|modelopt|quantized|quant))+$"
)


def published_draft(target: str) -> str:
    """The hub name of the first draft that is published for a target.

    Args:
        target: a folder or a hub name; of the model itself, a quantization of it, or another model
            that its card or config.json names it as the base of.

    Raises:
        ConfigError: none is known.
    """
    pairs = published_pairs()
    names = list(dict.fromkeys(_origins(target)))
    for name in names:
        for known, drafts in pairs.items():
            if known.casefold() == name.casefold():
                return drafts[0]
    for name in names:
        for known, drafts in pairs.items():
            if _model(known) == _model(name):
                return drafts[0]
    required = (
        f"give a folder or a hub name: no draft is known that is published for {target!r}; drafts "
        f"are known for {', '.join(pairs)}"
    )
    raise ConfigError("draft", required=required)


def _model(name: str) -> str:
    """The name without its organization and precision, in small letters."""
    return re.sub(_PRECISIONS, "", name.casefold().rstrip("/").rpartition("/")[2])


def _origins(target: str) -> Iterator[str]:
    """The target's name, then those of the models that its files say it was made of."""
    yield target
    config = cached_config(target)
    if config is None:
        return
    yield from _base_models(config.parent / "README.md")
    name = read_json_object(config, "target").get("_name_or_path")
    if isinstance(name, str) and name:
        yield name


def _base_models(card: Path) -> list[str]:
    """The entries `base_model` of a model card's front matter."""
    if not card.is_file():
        return []
    text = card.read_text(encoding="utf-8", errors="replace")
    front = re.match(r"---\s*\n(.*?)\n---\s*(?:\n|$)", text, re.DOTALL)
    # A name, or a list of them: in brackets, or one per line.
    entry = re.search(
        r"^base_model:[ \t]*(\S[^\n]*|(?:\n[ \t]*-[ \t]+[^\n]+)+)", front[1] if front else "", re.M
    )
    return re.findall(r"[\w.-]+/[\w.-]+", entry[1]) if entry else []
