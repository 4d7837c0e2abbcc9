"""The rotary embedding of a draft, from its config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sglang_dflash.checkpoint.fields import Fields

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
# What a scaling block holds besides its kind's fields.
_BESIDE_SCALING = ("type", "rope_type", "rope_theta", "partial_rotary_factor")


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding: base `theta` and the checkpoint's scaling fields (empty for none)."""

    theta: float
    scaling: Mapping[str, Any] = field(default_factory=dict)


def read_rope(fields: Fields) -> RopeConfig:
    """The rotary embedding. Every field of it is read or refused.

    Raises:
        ConfigError: a field is invalid.
        UnsupportedDraft: it is of a kind that is not implemented here.
    """
    block, parameters = fields.block("rope_scaling"), fields.block("rope_parameters")
    if not block.values:
        block = parameters
    for name in parameters.values:
        # Transformers has had two names for the block.
        if name != "rope_theta" and parameters.get(name) != block.get(name):
            raise parameters.unsupported(name, "rope_scaling is given, and differs")
    name = "rope_type" if "rope_type" in block else "type"
    rope_type = block.word(name) or "default"
    if rope_type not in _SCALING_FIELDS:
        raise block.unsupported(name, f"{', '.join(_SCALING_FIELDS)} are served")
    _refuse_other_layouts(fields, block)
    theta = _theta(block, fields, parameters)
    scaling, original = _scaling(block, rope_type), "original_max_position_embeddings"
    if original in fields:
        if original not in _SCALING_FIELDS[rope_type][1]:
            raise fields.unsupported(
                original, f"with rope_type {rope_type!r} this is not served here"
            )
        scaling[original] = _scale(fields, original)
    return RopeConfig(theta, {**scaling, "rope_type": rope_type} if rope_type != "default" else {})


def _theta(*places: Fields) -> float:
    sources = [place for place in places if "rope_theta" in place] or [places[0]]
    # Within the bounds frequencies stay finite in float32. Published ones are 1e4 to 1e7.
    thetas = [
        place.positive_number("rope_theta", 10000.0, least=1.001, most=1e15) for place in sources
    ]
    for place, theta in zip(sources, thetas, strict=True):
        if theta != thetas[0]:
            required = f"{thetas[0]:g}, as in {sources[0].path('rope_theta')},"
            raise place.error("rope_theta", required)
    return thetas[0]


def _refuse_other_layouts(fields: Fields, block: Fields) -> None:
    for place in (block, fields):
        if place.positive_number("partial_rotary_factor", default=1, most=1) < 1:
            required = "partial rotary embeddings are not served here"
            raise place.unsupported("partial_rotary_factor", required)
    if "mrope_section" in block:
        raise block.unsupported("mrope_section", "multi-axis embeddings are not served here")
    for name in ("rope_is_neox_style", "is_neox_style"):
        if not fields.flag(name, default=True):
            required = "rotary embeddings that pair adjacent dimensions are not served here"
            raise fields.unsupported(name, required)


def _scale(place: Fields, name: str) -> float:
    # As for theta. Published factors are up to 64.
    return place.positive_number(name, least=1e-9, most=1e9)


def _scaling(block: Fields, rope_type: str) -> dict[str, Any]:
    """The fields of a scaling block, checked. A field that `rope_type` does not have is refused."""
    required, optional = _SCALING_FIELDS[rope_type]
    names = [name for name in block.values if name in block and name not in _BESIDE_SCALING]
    for name in names:
        if name not in (*required, *optional):
            raise block.unsupported(name, f"with rope_type {rope_type!r} this is not served here")
    scaling: dict[str, Any] = {
        name: block.flag(name, default=True) if name == "truncate" else _scale(block, name)
        for name in dict.fromkeys((*required, *names))
    }
    if rope_type == "llama3" and scaling["high_freq_factor"] <= scaling["low_freq_factor"]:
        least = scaling["low_freq_factor"]
        raise block.error("high_freq_factor", f"more than low_freq_factor ({least})")
    return scaling
