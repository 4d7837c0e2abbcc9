"""A target and a draft, by their config files and the headers of the draft's weights: whether they
fit, which worker serves them, and what the configs say in words."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from sglang_dflash.drafting.options import Options, ResolvedOptions
from sglang_dflash.facts.draft_config import (
    DraftConfig,
    LayerAttention,
    draft_fields,
    draft_kv_shape,
)
from sglang_dflash.facts.errors import ConfigError, UnsupportedDraft
from sglang_dflash.facts.fields import Fields
from sglang_dflash.facts.published import ModelFacts, collection
from sglang_dflash.facts.target_config import TargetGeometry
from sglang_dflash.facts.tensors import check_tensors
from sglang_dflash.facts.values import check_values

OURS, BUILTIN, UNKNOWN = "sglang-dflash", "builtin", "unknown"


@dataclass(frozen=True)
class KnownDraft:
    """A draft as far as its facts go, including one that our worker does not serve.

    Attributes:
        config: None if our worker does not serve it or a field is unknown.
        unserved: why our worker does not serve it.
        unknown: what is not known of it.
    """

    facts: ModelFacts
    config: DraftConfig | None = None
    unserved: str | None = None
    unknown: str | None = None

    @classmethod
    def of(cls, facts: ModelFacts) -> KnownDraft:
        """Raises ConfigError if a field is invalid."""
        if facts.config is None:
            return cls(facts, unknown="the facts of this pair are KV sizes only")
        if facts.unknown:
            names = ", ".join(facts.unknown)
            return cls(facts, unknown=f"no source shows {names} of the draft's config.json")
        try:
            return cls(facts, DraftConfig.from_dict(facts.config))
        except UnsupportedDraft as reason:
            return cls(facts, unserved=str(reason))

    @property
    def block_size(self) -> int | None:
        """The checkpoint's; None if unknown. Raises ConfigError if it is invalid."""
        if self.config is not None or self.facts.config is None:
            return None if self.config is None else self.config.block_size
        either = draft_fields(self.facts.config)
        return either.positive_int("block_size") if "block_size" in either else None

    def check(self, geometry: TargetGeometry | None) -> None:
        """As a server does, as far as is known.

        Raises:
            ConfigError: the draft was trained for another target, its tensors are not those of its
                config, or, with weights in a local folder, a value is not finite or a weight all
                zeros.
        """
        config, facts = self.config, self.facts
        if config is None and facts.unknown and facts.config is not None:
            # The mask token may be unknown, and does not matter for this check.
            own = {"mask_token_id": 0, **(facts.config.get("dflash_config") or {})}
            config = DraftConfig.from_dict({**facts.config, "dflash_config": own})
        if config is not None and geometry is not None:
            config.check_target(
                hidden_size=geometry.hidden_size,
                vocab_size=geometry.vocab_size,
                num_layers=geometry.num_hidden_layers,
            )
        if self.config is not None and facts.tensors is not None:
            check_tensors(self.config, facts.tensors)
        if self.config is not None and facts.weights is not None:
            check_values(self.config, facts.weights)

    def resolve(self, options: Options) -> ResolvedOptions:
        """Fill in the draft's block size. Raises ConfigError if it is unknown and not given."""
        if self.block_size is not None:
            return options.for_trained_block(self.block_size)
        if options.block_size is None:
            raise ConfigError("block_size", None, "required, because the draft's is not known")
        return options.with_block_size(options.block_size)

    def kv_bytes(self, itemsize: int) -> int | None:
        """Of one token; None if the config is not known. Raises ConfigError: a field is invalid."""
        if self.facts.config is None:
            return None
        fields = draft_fields(self.facts.config)
        return itemsize * math.prod(self.config.kv_shape if self.config else draft_kv_shape(fields))


def choose_worker(target: ModelFacts, draft: ModelFacts) -> tuple[str, str | None]:
    """`worker` and `worker_reason` of a pair, as in `Findings`, without the memory arithmetic.

    Raises:
        ConfigError: the pair does not fit, or a field or tensor is invalid.
    """
    return judge(target, draft)[2:]


def judge(
    target: ModelFacts, draft: ModelFacts
) -> tuple[TargetGeometry | None, KnownDraft, str, str | None]:
    """What is known of both, and the choice that `serving.start.choose_worker` makes for a server
    without further flags, from files only."""
    geometry = None if target.config is None else TargetGeometry.from_dict(target.config)
    known = KnownDraft.of(draft)
    known.check(geometry)
    if known.unserved is not None:
        return geometry, known, BUILTIN, known.unserved
    if known.unknown is not None:
        return geometry, known, UNKNOWN, known.unknown
    if target.config is None:
        return geometry, known, UNKNOWN, "the facts of this target are KV sizes only"
    if Fields.of(target.config, "target").block("quantization_config").get("lm_head"):
        return geometry, known, BUILTIN, (
            "the target's lm_head: quantized by its quantization_config, a dense 16- or 32-bit "
            "weight is needed"
        )  # fmt: skip
    return geometry, known, OURS, None


def context_of(target: ModelFacts) -> int | None:
    """Tokens of a request, at most; None if the target's config does not tell."""
    text, name = Fields.of(target.config or {}, "target"), "max_position_embeddings"
    return text.positive_int(name) if name in text else None


def other_target(target: str, draft: str) -> list[str]:
    """A warning if the collection lists the draft for other targets."""
    listed = [
        pair.target
        for pair in collection().pairs
        if draft.casefold() in (name.casefold() for name in pair.drafts)
    ]
    if not listed or target.casefold() in (name.casefold() for name in listed):
        return []
    return [
        f"{draft} is published for {' and '.join(listed)}, not for {target}; with another "
        "target outputs stay exact, but few drafted tokens may be accepted"
    ]


def describe_target(target: ModelFacts, geometry: TargetGeometry | None) -> dict[str, Any]:
    """Its facts in `Findings`; None for what is not known."""
    raw, layers = target.config or {}, None
    if geometry is not None:
        recurrent, layers = geometry.recurrent_layers, f"{geometry.attention_layers} attention"
        layers = f"{recurrent} recurrent, {layers}" if recurrent else layers
    text = Fields.of(raw, "target")
    return {
        "target_architecture": _architecture(raw),
        "target_layers": layers,
        "target_dtype": text.get("dtype") or text.get("torch_dtype"),
        "target_context": text.get("max_position_embeddings"),
        "target_hidden_size": geometry.hidden_size if geometry else None,
        "target_vocab_size": geometry.vocab_size if geometry else None,
    }


def describe_draft(known: KnownDraft) -> dict[str, Any]:
    """Its facts in `Findings`; None for what is not known."""
    raw, config = known.facts.config or {}, known.config
    text, either, rope = Fields.of(raw, "draft"), draft_fields(raw), None
    layers, ids, mask = _layers(text), either.get("target_layer_ids"), either.get("mask_token_id")
    if config is not None:
        layers = _runs([_layer(layer) for layer in config.layers])
        ids, mask, rope = list(config.target_layer_ids), config.mask_token_id, _rope(config)
    return {
        "draft_architecture": _architecture(raw),
        "draft_layers": layers,
        "draft_dtype": text.get("dtype") or text.get("torch_dtype"),
        "draft_context": text.get("max_position_embeddings"),
        "target_layer_ids": ids,
        "mask_token_id": mask,
        "draft_rope": rope,
    }


def _architecture(raw: Mapping[str, Any]) -> str | None:
    """The class that the checkpoint names, or its model type."""
    named = raw.get("architectures")
    return named[0] if named else raw.get("model_type")


def _layer(layer: LayerAttention) -> str:
    notes = [] if layer.sliding_window is None else [f"window {layer.sliding_window}"]
    notes += ["causal"] if layer.causal else []
    kind = "full" if layer.sliding_window is None else "sliding"
    return f"{kind} ({', '.join(notes)})" if notes else kind


def _layers(text: Fields) -> str | None:
    """The layers of a draft that `DraftConfig` does not take; None if their number is unknown."""
    if "num_hidden_layers" not in text:
        return None
    depth = text.positive_int("num_hidden_layers")
    sliding = f"sliding (window {text.get('sliding_window')})"
    kinds = text.layer_types(depth) or ("full_attention",) * depth
    return _runs(
        [sliding if k == "sliding_attention" else k.removesuffix("_attention") for k in kinds]
    )


def _runs(kinds: list[str]) -> str:
    """Runs of equal layers, first to last: "4 sliding (window 2048, causal), 1 full"."""
    return ", ".join(f"{len(list(run))} {kind}" for kind, run in groupby(kinds))


def _rope(config: DraftConfig) -> str:
    theta, scaling = f"theta {config.rope.theta:g}", config.rope.scaling
    if not scaling:
        return theta
    return f"{theta}, {scaling['rope_type']} with factor {float(scaling['factor']):g}"
