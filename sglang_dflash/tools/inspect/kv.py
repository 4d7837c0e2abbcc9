"""Draft KV by group of layers, and what the target keeps beside it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from sglang_dflash.checkpoint.draft_config import LayerGroup
from sglang_dflash.common.errors import ConfigError
from sglang_dflash.drafting.options import ResolvedOptions
from sglang_dflash.memory.pools import running_requests
from sglang_dflash.memory.sizes import Charge, GroupKV, draft_kv_charge
from sglang_dflash.serving.metrics.server import BUILTIN
from sglang_dflash.tools.inspect.pair import ServingDecision

GIB = 2**30


class StatePool(NamedTuple):
    """SGLang's pool of recurrent states, unless a flag gives its size.

    Attributes:
        slots: states, of running requests and of cached prefixes.
        requests: that can run at a time with so many states.
        total_bytes: of the states, and of the tensors that verification keeps.
    """

    slots: int
    requests: int
    total_bytes: int


def state_pool(slots: int, requests: int, state: int, replay: int, snapshot: int) -> StatePool:
    """The pool of so many states, as SGLang 0.5.23 allocates it.

    Args:
        slots: states; 0 or less if none fits.
        requests: --max-running-requests.
        state: bytes of a state.
        replay, snapshot: bytes that verification keeps of a request; one of them is 0.
    """
    running = running_requests(requests, slots)
    kept = (requests + 1) * replay + (running + 1) * snapshot
    return StatePool(slots, running, kept + (slots + 1) * state)


# Draft layers that read the same of a request, and their draft KV. The layers' numbers are empty if
# the config does not tell.
DraftGroup = tuple[LayerGroup, GroupKV]


def draft_groups(
    decision: ServingDecision, options: ResolvedOptions, draft_kv: int, requests: int
) -> list[DraftGroup]:
    """Return the groups of the draft's layers; one of all layers if its config is not known or
    another worker serves.

    Args:
        draft_kv: bytes of a token, over all layers.
    """
    config, reach = decision.config, options.reach
    if config is None or decision.worker == BUILTIN:
        ring = None if decision.worker == BUILTIN else options.ring_entries(reach, requests)
        return [(LayerGroup(reach, (), ()), GroupKV(draft_kv, ring))]
    each = draft_kv // config.num_hidden_layers
    return [
        (group, GroupKV(len(group.numbers) * each, options.ring_entries(group.reach, requests)))
        for group in config.groups(reach)
    ]


def _described(group: LayerGroup, kv: GroupKV, target_tokens: int) -> dict[str, Any]:
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
    unbounded = memory // (target_bytes + draft_bytes)
    if not unbounded:
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
        "draft_kv_bytes_unbounded": unbounded * draft_bytes,
        "target_tokens": tokens,
        "target_tokens_unbounded": unbounded,
        "target_tokens_gain": tokens / unbounded - 1,
        "target_tokens_gain_ceiling": draft_bytes / target_bytes,
    }
