"""The rotary embedding fields of a draft's config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sglang_dflash.checkpoint.errors import ConfigError, UnsupportedDraft
from sglang_dflash.checkpoint.fields import Fields


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding: base `theta` and the checkpoint's scaling fields (empty for none)."""

    theta: float
    scaling: Mapping[str, Any] = field(default_factory=dict)


# Fields of each kind of rotary scaling: required ones, then optional ones.
_SCALING_FIELDS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "llama3": (
        ("factor", "low_freq_factor", "high_freq_factor"),
        ("original_max_position_embeddings",),
    ),
    "yarn": (
        ("factor",),
        (
            "original_max_position_embeddings",
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
            "truncate",
        ),
    ),
}
# Fields that a scaling block holds besides its kind's.
_COMMON_FIELDS = ("type", "rope_type", "rope_theta", "partial_rotary_factor")
# Fields for which 0 means "not given".
_ZERO_IS_MISSING = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim")


def read_rope(text: Fields) -> RopeConfig:
    """Read the rotary embedding from the fields of a draft.

    Raises:
        ConfigError: a field is missing or invalid.
        UnsupportedDraft: a field or kind of scaling is not implemented here.
    """
    block = text.block("rope_scaling" if text.get("rope_scaling") else "rope_parameters")
    kind = block.get("rope_type") or block.get("type") or "default"
    if kind not in _SCALING_FIELDS:
        raise UnsupportedDraft(
            f"{block.path('rope_type')}: {kind!r}; default, linear, yarn and llama3 are served"
        )
    _refuse_other_layouts(text, block)
    theta = _theta(text, block)
    scaling = _scaling(block, kind)
    if kind == "default":
        return RopeConfig(theta)
    original = "original_max_position_embeddings"
    if original in text and kind in ("llama3", "yarn"):
        scaling[original] = text.positive_number(original)
    return RopeConfig(theta, {**scaling, "rope_type": kind})


def _refuse_other_layouts(text: Fields, block: Fields) -> None:
    is_partial = (
        block.get("partial_rotary_factor") not in (None, 1)
        or text.get("partial_rotary_factor") not in (None, 0, 1)
    )  # fmt: skip
    if is_partial or "mrope_section" in block:
        raise UnsupportedDraft(
            "partial_rotary_factor / mrope_section: drafts with a partial or multi-axis rotary "
            "embedding are not served here"
        )
    for name in ("rope_is_neox_style", "is_neox_style"):
        if text.get(name) is False:
            raise UnsupportedDraft(
                f"{text.path(name)}: False; rotary embeddings that pair adjacent dimensions are "
                "not served here"
            )


def _theta(text: Fields, block: Fields) -> float:
    places = (block, text, text.block("rope_parameters"))
    given = next((place for place in places if "rope_theta" in place), text)
    return float(given.positive_number("rope_theta", default=10000.0))


def _scaling(block: Fields, kind: str) -> dict[str, Any]:
    """The fields of a scaling block, checked. A field that `kind` does not have is refused."""
    required, optional = _SCALING_FIELDS[kind]
    given = [
        name
        for name in block.values
        if name in block
        and name not in _COMMON_FIELDS
        and not (name in _ZERO_IS_MISSING and block.get(name) == 0)
    ]
    for name in given:
        if name not in (*required, *optional):
            raise UnsupportedDraft(
                f"{block.path(name)}: {block.get(name)!r}; with rope_type {kind!r} this field is "
                "not served here"
            )
    scaling: dict[str, Any] = {
        name: block.flag(name, default=True) if name == "truncate" else block.positive_number(name)
        for name in dict.fromkeys((*required, *given))
    }
    if kind == "llama3" and scaling["high_freq_factor"] <= scaling["low_freq_factor"]:
        raise ConfigError(
            f"{block.path('high_freq_factor')}: {scaling['high_freq_factor']} is not above "
            f"low_freq_factor ({scaling['low_freq_factor']})"
        )
    return scaling
