"""The draft that is published for a target, by the target's name or by what its files say of its
origin. No torch."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from sglang_dflash.checkpoint.fields import read_json_object
from sglang_dflash.checkpoint.hub import cached_config
from sglang_dflash.checkpoint.published import published_pairs
from sglang_dflash.common.errors import ConfigError

# Suffixes that a quantized checkpoint's name adds to the model's.
_PRECISIONS = (
    r"(?:[-_.](?:bf16|fp16|fp8|fp4|nf4|int8|int4|nvfp4|mxfp4|mxfp8|[48]-?bit|w\d+a\d+|w4afp8|awq"
    r"|gptq|bnb|autoround|dynamic|block|modelopt|quantized|quant))+$"
)


def published_draft(target: str) -> str:
    """The hub name of the first draft that is published for a target.

    Args:
        target: a folder or a hub name: of a model that has a draft, of a quantization of one, or,
            if its files are here, of a model whose card or config.json names one as its base.

    Raises:
        ConfigError: none is known.
    """
    drafts = published_drafts(target)
    if not drafts:
        required = (
            "give a folder or a hub name: no draft is known that is published for "
            f"{target!r}; drafts are known for {', '.join(published_pairs())}"
        )
        raise ConfigError("draft", required=required)
    return drafts[0]


def published_drafts(target: str) -> Sequence[str]:
    """The hub names of all drafts that are published for a target, see `published_draft`; empty if
    none is known."""
    for name in _origins(target):
        for spelled in (str.casefold, _model):
            for published, drafts in published_pairs().items():
                if spelled(published) == spelled(name):
                    return drafts
    return ()


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
    plain = re.sub(r"(?m)\s#.*$", "", front[1]) if front else ""
    # A list of names in brackets, a name, or a list with a name per line.
    entry = re.search(
        r"(?m)^base_model:[ \t]*(\[[^\]]*\]|\S[^\n]*|(?:\n[ \t]*-[ \t]+[^\n]+)+)", plain
    )
    return re.findall(r"[\w.-]+/[\w.-]+", entry[1]) if entry else []
