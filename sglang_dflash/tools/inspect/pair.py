"""A target and a draft, by their config files and the headers of the draft's weights: whether they
fit, which worker serves them, and what the configs say in words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from sglang_dflash.checkpoint.draft_config import DraftConfig, LayerAttention, draft_fields
from sglang_dflash.checkpoint.fields import Fields
from sglang_dflash.checkpoint.origin import published_drafts
from sglang_dflash.checkpoint.published import ModelFacts, published_pairs
from sglang_dflash.checkpoint.target_classes import check_last_layer, check_target_class
from sglang_dflash.checkpoint.target_config import TargetGeometry, context_of
from sglang_dflash.checkpoint.tensors import check_embedding, check_tensors, check_values
from sglang_dflash.common.errors import UnsupportedDraft, shown_pair
from sglang_dflash.serving.metrics.server_info import BUILTIN, OURS


@dataclass(frozen=True)
class ServingDecision:
    """The worker that serves a pair, and the configs that decide it.

    Attributes:
        config: of the draft; None if our worker does not serve it or a field is unknown.
        worker: `OURS`, `BUILTIN` or "unknown".
        reason: why it is not ours; None if it is.
    """

    geometry: TargetGeometry
    config: DraftConfig | None
    worker: str
    reason: str | None


def decide_worker(target: ModelFacts, draft: ModelFacts) -> ServingDecision:
    """The choice that `serving.start.choose_worker` makes for a server without further flags, from
    files only.

    Raises:
        ConfigError: SGLang gives no worker the target's hidden states, a field is invalid, the
            draft was trained for another target, its tensors are not those of its config, or, with
            weights in a local folder, a value is not finite or a weight all zeros.
    """
    check_target_class(target.name, target.config.get("architectures"))
    geometry = TargetGeometry.from_dict(target.config)
    config, worker, reason = None, OURS, None
    if draft.unknown:
        worker = "unknown"
        reason = f"no source shows {', '.join(draft.unknown)} of the draft's config.json"
    else:
        try:
            config = DraftConfig.from_dict(draft.config)
        except UnsupportedDraft as other:
            worker, reason = BUILTIN, str(other)
    _check(target, draft, config, geometry)
    return ServingDecision(geometry, config, worker, reason)


def _check(
    target: ModelFacts,
    draft: ModelFacts,
    config: DraftConfig | None,
    geometry: TargetGeometry,
) -> None:
    """Compare the draft with the target and with its own weights, as far as is known."""
    comparable = config
    if draft.unknown:
        # The mask token may be unknown, and does not matter for this check.
        dflash_config = {"mask_token_id": 0, **(draft.config.get("dflash_config") or {})}
        comparable = DraftConfig.from_dict({**draft.config, "dflash_config": dflash_config})
    if comparable is not None:
        comparable.check_target(
            hidden_size=geometry.hidden_size,
            vocab_size=geometry.vocab_size,
            num_layers=geometry.num_hidden_layers,
            pair=shown_pair(draft.name, target.name),
        )
        names = target.config.get("architectures")
        check_last_layer(comparable.target_layer_ids, geometry.num_hidden_layers, names)
    if config is not None and draft.tensors is not None:
        check_tensors(config, draft.tensors)
    if config is not None and draft.weights is not None:
        check_embedding(draft.weights)
        check_values(config, draft.weights)


def other_target(target: str, draft: str) -> list[str]:
    """A warning if the collection lists the draft for other targets only.

    Args:
        target: a folder or a hub name, also of a quantization or a fine-tune of a listed target.
    """
    listed = [
        published
        for published, drafts in published_pairs().items()
        if draft.casefold() in (name.casefold() for name in drafts)
    ]
    if not listed or draft.casefold() in map(str.casefold, published_drafts(target)):
        return []
    return [
        f"{draft} is published for {' and '.join(listed)}, not for {target}; with another "
        "target outputs stay exact, but few drafted tokens may be accepted"
    ]


def describe_target(target: ModelFacts, geometry: TargetGeometry) -> dict[str, Any]:
    """Facts of the target in the report; None for unknown ones."""
    recurrent, layers = geometry.recurrent_layers, f"{geometry.attention_layers} attention"
    if geometry.sliding_layers:
        layers += f", {geometry.sliding_layers} of them sliding"
    layers = f"{recurrent} recurrent, {layers}" if recurrent else layers
    text = Fields.of(target.config, "target")
    return {
        "target_architecture": _architecture(target.config),
        "target_layers": layers,
        "target_dtype": text.get("dtype") or text.get("torch_dtype"),
        "target_context": context_of(target.config),
        "target_hidden_size": geometry.hidden_size,
        "target_vocab_size": geometry.vocab_size,
    }


def describe_draft(draft: ModelFacts, config: DraftConfig | None) -> dict[str, Any]:
    """Facts of the draft in the report; None for unknown ones."""
    fields, rope = draft_fields(draft.config), None
    layers, ids, mask = (
        _layers(fields), fields.get("target_layer_ids"), fields.get("mask_token_id")
    )  # fmt: skip
    if config is not None:
        layers = _runs([_layer(layer) for layer in config.layers])
        ids, mask, rope = list(config.target_layer_ids), config.mask_token_id, _rope(config)
    return {
        "draft_architecture": _architecture(draft.config),
        "draft_kind": config and config.head.description,
        "draft_layers": layers,
        "draft_dtype": fields.get("dtype") or fields.get("torch_dtype"),
        "draft_quantization": _quantization(config),
        "draft_context": fields.get("max_position_embeddings"),
        "target_layer_ids": ids,
        "mask_token_id": mask,
        "draft_rope": rope,
        "draft_vocab_size": config and config.draft_vocab_size,
    }


def _quantization(config: DraftConfig | None) -> str | None:
    if config is None or config.quantization is None:
        return None
    return f"{config.quantization}, dequantized when it is loaded"


def _architecture(raw: Mapping[str, Any]) -> str | None:
    """The class that the checkpoint names, or its model type."""
    named = raw.get("architectures")
    return named[0] if named else raw.get("model_type")


def _layer(layer: LayerAttention) -> str:
    notes = [] if layer.sliding_window is None else [f"window {layer.sliding_window}"]
    notes += ["causal"] if layer.causal else []
    attention = "full" if layer.sliding_window is None else "sliding"
    return f"{attention} ({', '.join(notes)})" if notes else attention


def _layers(fields: Fields) -> str | None:
    """The layers of a draft that `DraftConfig` does not take; None if their number is unknown."""
    if "num_hidden_layers" not in fields:
        return None
    depth = fields.positive_int("num_hidden_layers")
    sliding = f"sliding (window {fields.get('sliding_window')})"
    kinds = fields.layer_types(depth) or ("full_attention",) * depth
    return _runs(
        [sliding if k == "sliding_attention" else k.removesuffix("_attention") for k in kinds]
    )


def _runs(kinds: list[str]) -> str:
    """Runs of equal layers, first to last: "4 sliding (window 2048, causal), 1 full"."""
    return ", ".join(f"{len(list(run))} {layer}" for layer, run in groupby(kinds))


def _rope(config: DraftConfig) -> str:
    theta, scaling = f"theta {config.rope.theta:g}", config.rope.scaling
    if not scaling:
        return theta
    return f"{theta}, {scaling['rope_type']} with factor {float(scaling['factor']):g}"
