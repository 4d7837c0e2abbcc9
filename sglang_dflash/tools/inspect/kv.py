"""Division of the KV memory between target and draft, by group of draft layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sglang_dflash.checkpoint.draft_config import LayerGroup, draft_fields, draft_kv_shape
from sglang_dflash.checkpoint.published import ModelFacts
from sglang_dflash.checkpoint.target_config import kv_heads_of_rank
from sglang_dflash.common.errors import ConfigError
from sglang_dflash.drafting.options import ResolvedOptions
from sglang_dflash.memory.sizes import KV_DTYPES, Charge, GroupKVSize, draft_kv, draft_kv_charge
from sglang_dflash.serving.metrics.server_info import BUILTIN, OURS
from sglang_dflash.tools.inspect.pair import ServingDecision
from sglang_dflash.tools.inspect.serving import Serving

GIB = 2**30


# Draft layers that read the same of a request, and their draft KV. The layers' numbers are empty if
# the config does not tell.
DraftGroup = tuple[LayerGroup, GroupKVSize]


def draft_groups(
    draft: ModelFacts,
    decision: ServingDecision,
    options: ResolvedOptions,
    serving: Serving,
    carried: int,
) -> list[DraftGroup]:
    """Return the groups of the draft's layers; one of all layers if its config is not known or
    another worker serves. Raises ConfigError.

    Args:
        carried: requests that rings are for.
    """
    config, reach, ranks = decision.config, options.reach, serving.tp_size
    itemsize = KV_DTYPES[serving.dtype_of_draft_kv]
    if config is not None and decision.worker == OURS:
        kv = draft_kv(
            config, options, carried, itemsize=itemsize, ranks=ranks,
            hierarchical=False, disaggregated=False,
        )  # fmt: skip
        return list(zip(config.groups(reach), kv, strict=True))
    layers, two, heads, dim = draft_kv_shape(draft_fields(draft.config))
    token_bytes = layers * two * kv_heads_of_rank("draft", heads, ranks) * dim * itemsize
    # SGLang's worker has no rings.
    ring = None if decision.worker == BUILTIN else options.ring_entries(reach, carried)
    return [(LayerGroup(reach, (), ()), GroupKVSize(token_bytes, ring))]


def _described(group: LayerGroup, kv: GroupKVSize, target_tokens: int) -> dict[str, Any]:
    """A group beside a target pool of that many tokens."""
    entries = kv.entries(target_tokens)
    return {
        "layers": list(group.numbers),
        "window": group.reach.tokens,
        "entries": target_tokens if entries is None else entries,
        "ring": entries is not None,
        "bytes": Charge.of([kv], target_tokens).total(target_tokens),
    }


def split_kv(memory: int, target_bytes: int, groups: Sequence[DraftGroup]) -> dict[str, Any]:
    """Divide `memory` bytes between target and draft KV.

    Args:
        target_bytes: KV bytes of one token.
        groups: of draft layers.

    Raises:
        ConfigError: the memory does not hold one token.
    """
    of_groups = [kv for _, kv in groups]
    draft_bytes = sum(group.token_bytes for group in of_groups)
    if memory < target_bytes + draft_bytes:
        raise ConfigError(
            "kv_memory_gib",
            memory / GIB,
            f"this does not hold one token of {target_bytes + draft_bytes} bytes; give more",
        )

    def fits(charge: Charge) -> int:
        return (memory - charge.once) // (target_bytes + charge.per_token)

    charge = draft_kv_charge(of_groups, fits)
    tokens = fits(charge)
    return {
        "draft_kv_groups": [_described(*group, tokens) for group in groups],
        "draft_kv_bytes": charge.total(tokens),
        "target_tokens": tokens,
        "target_tokens_gain_ceiling": draft_bytes / target_bytes,
    }
