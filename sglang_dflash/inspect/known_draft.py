"""A draft as far as its facts go, including one that our worker does not serve."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_dflash.drafting.options import Options, ResolvedOptions
from sglang_dflash.facts.draft_config import DraftConfig, draft_fields, draft_kv_shape
from sglang_dflash.facts.errors import ConfigError, UnsupportedDraft
from sglang_dflash.facts.published import ModelFacts
from sglang_dflash.facts.sizes import draft_weight_bytes
from sglang_dflash.facts.target_config import TargetGeometry
from sglang_dflash.facts.tensors import StoredTensor, check_tensors
from sglang_dflash.facts.values import check_values
from sglang_dflash.inspect.memory import (
    Serving,
    drafter_bytes,
    stated_kv_bytes,
)


@dataclass(frozen=True)
class KnownDraft:
    """What is known of a draft.

    Attributes:
        raw: its config.json or the known part of it; None if only KV bytes are known.
        config: None if our worker does not serve it or a field is unknown.
        unserved: why our worker does not serve it.
        unknown: which fields are unknown.
        kv_bytes_per_token: draft KV bytes of one token.
        weight_bytes: None if unknown.
        block_size: the checkpoint's; None if unknown.
        tensors, weights: see `ModelFacts`.
    """

    raw: Mapping[str, Any] | None
    config: DraftConfig | None
    unserved: str | None
    unknown: str | None
    kv_bytes_per_token: int
    weight_bytes: int | None
    block_size: int | None
    tensors: Mapping[str, StoredTensor] | None = None
    weights: Path | None = None

    @classmethod
    def of(cls, facts: ModelFacts, serving: Serving) -> KnownDraft:
        """Raises ConfigError if a field is invalid or the KV bytes are unknown."""
        config, unserved, unknown = None, None, None
        if facts.config is None:
            stated = stated_kv_bytes(facts, "--draft-kv-dtype", serving.draft_kv_dtype)
            return cls(None, None, None, None, stated, facts.weight_bytes, None)
        if facts.unknown:
            unknown = f"no source shows {', '.join(facts.unknown)} of the draft's config.json"
        else:
            try:
                config = DraftConfig.from_dict(facts.config)
            except UnsupportedDraft as reason:
                unserved = str(reason)
        fields = draft_fields(facts.config)
        shape = config.kv_shape if config else draft_kv_shape(fields)
        block_size = fields.positive_int("block_size") if "block_size" in fields else None
        return cls(
            raw=facts.config,
            config=config,
            unserved=unserved,
            unknown=unknown,
            kv_bytes_per_token=math.prod(shape) * serving.draft_kv_dtype_bytes,
            weight_bytes=draft_weight_bytes(config) if config else facts.weight_bytes,
            block_size=config.block_size if config else block_size,
            tensors=facts.tensors,
            weights=facts.weights,
        )

    def check_target(self, geometry: TargetGeometry) -> None:
        """Raise ConfigError if the draft was trained for another target, as far as is known."""
        config = self.config
        if self.unknown is not None and self.raw is not None:
            # The mask token may be unknown, and does not matter for this check.
            own = {"mask_token_id": 0, **(self.raw.get("dflash_config") or {})}
            config = DraftConfig.from_dict({**self.raw, "dflash_config": own})
        if config is not None:
            config.check_target(
                hidden_size=geometry.hidden_size,
                vocab_size=geometry.vocab_size,
                num_layers=geometry.num_hidden_layers,
            )

    @property
    def checked_tensors(self) -> int | None:
        """How many tensors `check_weights` checks; None for none."""
        return None if self.config is None or self.tensors is None else len(self.tensors)

    @property
    def checked_values(self) -> str | None:
        """What `check_weights` finds of the values of an accepted draft; None if it reads none."""
        return None if self.config is None or self.weights is None else "finite"

    def check_weights(self) -> None:
        """Raise ConfigError if the tensors at hand are not those of the config, as a server does,
        and of weights in a local folder if a value is not finite or a weight all zeros. Those of a
        draft that our worker does not serve are not checked."""
        if self.config is not None and self.tensors is not None:
            check_tensors(self.config, self.tensors)
        if self.config is not None and self.weights is not None:
            check_values(self.config, self.weights)

    def step_bytes(
        self, options: ResolvedOptions, serving: Serving, context: int | None
    ) -> int | None:
        """`drafter_bytes` for requests of that many tokens, at most; None without a config."""
        if self.config is None:
            return None
        return drafter_bytes(self.config, options, serving, context or 0)

    def resolve(self, options: Options) -> ResolvedOptions:
        """Fill in the draft's block size. Raises ConfigError if it is unknown and not given."""
        if self.block_size is not None:
            return options.for_trained_block(self.block_size)
        if options.block_size is None:
            raise ConfigError("block_size", None, "required, because the draft's is not known")
        return options.with_block_size(options.block_size)
