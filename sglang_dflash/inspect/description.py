"""What the two config.json files of a pair say about it, in words and numbers for reading."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from sglang_dflash.facts.draft_config import DraftConfig, LayerAttention, draft_fields
from sglang_dflash.facts.fields import Fields
from sglang_dflash.facts.target_config import TargetGeometry


@dataclass(frozen=True)
class TargetDescription:
    """A fact is None if the config does not give it or is unknown."""

    target_architecture: str | None = None
    target_layers: str | None = None
    target_dtype: str | None = None
    target_context: int | None = None
    target_hidden_size: int | None = None
    target_vocab_size: int | None = None


@dataclass(frozen=True)
class DraftDescription:
    """A fact is None if the config does not give it or is unknown.

    `target_layer_ids`: the target layers whose outputs the draft reads, counted from 0.
    """

    draft_architecture: str | None = None
    draft_layers: str | None = None
    draft_dtype: str | None = None
    draft_context: int | None = None
    target_layer_ids: list[int] | None = None
    mask_token_id: int | None = None
    draft_rope: str | None = None


def describe_target(
    raw: Mapping[str, Any] | None, geometry: TargetGeometry | None
) -> TargetDescription:
    """Describe a target by its parsed config.json and what was read from it."""
    if raw is None or geometry is None:
        return TargetDescription()
    text = Fields.of(raw, "target")
    attention, recurrent = f"{geometry.attention_layers} attention", geometry.recurrent_layers
    return TargetDescription(
        target_architecture=_architecture(raw),
        target_layers=f"{recurrent} recurrent, {attention}" if recurrent else attention,
        target_dtype=_dtype(text),
        target_context=text.get("max_position_embeddings"),
        target_hidden_size=geometry.hidden_size,
        target_vocab_size=geometry.vocab_size,
    )


def describe_draft(raw: Mapping[str, Any] | None, config: DraftConfig | None) -> DraftDescription:
    """Describe a draft by its parsed config.json.

    Args:
        config: what was read from `raw`; None if our worker does not serve the draft or a field is
            unknown.
    """
    if raw is None:
        return DraftDescription()
    text, either = Fields.of(raw, "draft"), draft_fields(raw)
    if config is not None:
        layers: str | None = _runs([_layer_kind(layer) for layer in config.layers])
        layer_ids, mask_token_id = list(config.target_layer_ids), config.mask_token_id
    else:
        layers = _layers_of_fields(text)
        layer_ids, mask_token_id = either.get("target_layer_ids"), either.get("mask_token_id")
    return DraftDescription(
        draft_architecture=_architecture(raw),
        draft_layers=layers,
        draft_dtype=_dtype(text),
        draft_context=text.get("max_position_embeddings"),
        target_layer_ids=layer_ids,
        mask_token_id=mask_token_id,
        draft_rope=_rope(config) if config else None,
    )


def _layer_kind(layer: LayerAttention) -> str:
    notes = [] if layer.sliding_window is None else [f"window {layer.sliding_window}"]
    notes += ["causal"] if layer.causal else []
    kind = "full" if layer.sliding_window is None else "sliding"
    return f"{kind} ({', '.join(notes)})" if notes else kind


def _layers_of_fields(text: Fields) -> str | None:
    """The layers of a draft that `DraftConfig` does not take; None if their number is unknown."""
    if "num_hidden_layers" not in text:
        return None
    depth = text.positive_int("num_hidden_layers")
    sliding = f"sliding (window {text.get('sliding_window')})"
    return _runs(
        [
            sliding if kind == "sliding_attention" else kind.removesuffix("_attention")
            for kind in text.layer_types(depth) or ("full_attention",) * depth
        ]
    )


def _runs(kinds: list[str]) -> str:
    """Runs of equal layers, first to last: "4 sliding (window 2048, causal), 1 full"."""
    return ", ".join(f"{len(list(run))} {kind}" for kind, run in groupby(kinds))


def _rope(config: DraftConfig) -> str:
    theta, scaling = f"theta {config.rope.theta:g}", config.rope.scaling
    if not scaling:
        return theta
    return f"{theta}, {scaling['rope_type']} with factor {float(scaling['factor']):g}"


def _architecture(raw: Mapping[str, Any]) -> str | None:
    """The class that the checkpoint names, or its model type."""
    named = raw.get("architectures")
    return named[0] if named else raw.get("model_type")


def _dtype(text: Fields) -> str | None:
    return text.get("dtype") or text.get("torch_dtype")
