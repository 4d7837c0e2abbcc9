"""What the two config.json files of a pair say about it, in words and numbers for reading."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from sglang_dflash.checkpoint.draft_config import DraftConfig
from sglang_dflash.checkpoint.target_config import TargetGeometry


@dataclass(frozen=True)
class TargetDescription:
    """None where the config does not say it, or is not known."""

    target_architecture: str | None = None
    target_layers: str | None = None
    target_dtype: str | None = None
    target_context: int | None = None
    target_hidden_size: int | None = None
    target_vocab_size: int | None = None


@dataclass(frozen=True)
class DraftDescription:
    """None where the config does not say it, or is not known. `target_layer_ids`: whose outputs the draft reads, counted from 0."""

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
    if raw is None or geometry is None:
        return TargetDescription()
    text = {**raw, **(raw.get("text_config") or {})}
    full, recurrent = geometry.attention_layers, geometry.recurrent_layers
    return TargetDescription(
        target_architecture=_architecture(raw),
        target_layers=f"{recurrent} recurrent, {full} attention"
        if recurrent
        else f"{full} attention",
        target_dtype=_dtype(text),
        target_context=text.get("max_position_embeddings"),
        target_hidden_size=geometry.hidden_size,
        target_vocab_size=geometry.vocab_size,
    )


def describe_draft(raw: Mapping[str, Any] | None, config: DraftConfig | None) -> DraftDescription:
    """`config`: what our drafter reads `raw` as; None where it does not take it or not all of it is known."""
    if raw is None:
        return DraftDescription()
    text = {**raw, **(raw.get("text_config") or {})}
    either = {**text, **(raw.get("dflash_config") or {})}
    return DraftDescription(
        draft_architecture=_architecture(raw),
        draft_layers=draft_layers(text, config),
        draft_dtype=_dtype(text),
        draft_context=text.get("max_position_embeddings"),
        target_layer_ids=list(config.target_layer_ids)
        if config
        else either.get("target_layer_ids"),
        mask_token_id=config.mask_token_id if config else either.get("mask_token_id"),
        draft_rope=_rope(config) if config else None,
    )


def draft_layers(text: Mapping[str, Any], config: DraftConfig | None) -> str | None:
    """Runs of equal layers, first to last: "4 sliding (window 2048, causal), 1 full"."""
    if config is not None:
        kinds = [
            ("full" if layer.sliding_window is None else "sliding")
            + _in_brackets(
                [f"window {layer.sliding_window}"] * (layer.sliding_window is not None)
                + ["causal"] * layer.causal
            )
            for layer in config.layers
        ]
    else:
        depth, window = text.get("num_hidden_layers"), text.get("sliding_window")
        if not isinstance(depth, int):
            return None
        types = text.get("layer_types") or ["full_attention"] * depth
        kinds = [
            f"sliding (window {window})"
            if kind == "sliding_attention"
            else kind.removesuffix("_attention")
            for kind in types
        ]
    return ", ".join(f"{len(list(run))} {kind}" for kind, run in groupby(kinds))


def _in_brackets(words: list[str]) -> str:
    return f" ({', '.join(words)})" if words else ""


def _rope(config: DraftConfig) -> str:
    scaling = config.rope.scaling
    name = scaling.get("rope_type")
    return f"theta {config.rope.theta:g}" + (
        f", {name} with factor {float(scaling['factor']):g}" if name else ""
    )


def _architecture(raw: Mapping[str, Any]) -> str | None:
    """The class that the checkpoint names, or else its model type."""
    named = raw.get("architectures")
    return named[0] if named else raw.get("model_type")


def _dtype(text: Mapping[str, Any]) -> str | None:
    return text.get("dtype") or text.get("torch_dtype")
