"""The rotary embedding fields of a draft's config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sglang_dflash.facts.fields import Fields


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
# Bounds within which frequencies stay finite in float32. Published thetas are 1e4 to 1e7, factors
# up to 64.
_LEAST_THETA, _MOST_THETA = 1.001, 1e15
_LEAST_SCALE, _MOST_SCALE = 1e-9, 1e9
# Fields for which 0 means "not given".
_ZERO_IS_MISSING = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim")


def read_rope(text: Fields) -> RopeConfig:
    """Read the rotary embedding from the fields of a draft.

    Raises:
        ConfigError: a field is missing or invalid.
        UnsupportedDraft: a field or kind of scaling is not implemented here.
    """
    block = text.block("rope_scaling")
    if not block.values:
        block = text.block("rope_parameters")
    name = "rope_type" if "rope_type" in block else "type"
    kind = block.word(name) or "default"
    if kind not in _SCALING_FIELDS:
        raise block.unsupported(name, f"{', '.join(_SCALING_FIELDS)} are served")
    _refuse_other_layouts(text, block)
    theta = _theta(text, block)
    scaling = _scaling(block, kind)
    if kind == "default":
        return RopeConfig(theta)
    original = "original_max_position_embeddings"
    if original in text and kind in ("llama3", "yarn"):
        scaling[original] = _scale(text, original)
    return RopeConfig(theta, {**scaling, "rope_type": kind})


def _refuse_other_layouts(text: Fields, block: Fields) -> None:
    partial = "partial_rotary_factor"
    # At the top level 0 means "not given".
    places = [block] if _is_zero(text, partial) else [block, text]
    for place in places:
        if place.positive_number(partial, default=1, most=1) < 1:
            raise place.unsupported(partial, "partial rotary embeddings are not served here")
    if "mrope_section" in block:
        raise block.unsupported("mrope_section", "multi-axis embeddings are not served here")
    for name in ("rope_is_neox_style", "is_neox_style"):
        if not text.flag(name, default=True):
            required = "rotary embeddings that pair adjacent dimensions are not served here"
            raise text.unsupported(name, required)


def _is_zero(place: Fields, name: str) -> bool:
    value = place.get(name)
    return value == 0 and not isinstance(value, bool)


def _theta(text: Fields, block: Fields) -> float:
    places = (block, text, text.block("rope_parameters"))
    given = next((place for place in places if "rope_theta" in place), text)
    theta = given.positive_number(
        "rope_theta", default=10000.0, least=_LEAST_THETA, most=_MOST_THETA
    )
    return float(theta)


def _scale(place: Fields, name: str) -> float:
    return place.positive_number(name, least=_LEAST_SCALE, most=_MOST_SCALE)


def _scaling(block: Fields, kind: str) -> dict[str, Any]:
    """The fields of a scaling block, checked. A field that `kind` does not have is refused."""
    required, optional = _SCALING_FIELDS[kind]
    given = [
        name
        for name in block.values
        if name in block
        and name not in _COMMON_FIELDS
        and not (name in _ZERO_IS_MISSING and _is_zero(block, name))
    ]
    for name in given:
        if name not in (*required, *optional):
            raise block.unsupported(name, f"with rope_type {kind!r} this is not served here")
    scaling: dict[str, Any] = {
        name: block.flag(name, default=True) if name == "truncate" else _scale(block, name)
        for name in dict.fromkeys((*required, *given))
    }
    if kind == "llama3" and scaling["high_freq_factor"] <= scaling["low_freq_factor"]:
        least = scaling["low_freq_factor"]
        raise block.error("high_freq_factor", f"more than low_freq_factor ({least})")
    return scaling
