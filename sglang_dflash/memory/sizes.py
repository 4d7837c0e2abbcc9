"""Bytes, from configs: of weights, K/V and recurrent states. No torch here.

`sglang-dflash inspect` and a server's reservation read the same functions. An `itemsize` is the
bytes of one number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from typing import NamedTuple

from sglang_dflash.checkpoint.draft_config import DraftConfig
from sglang_dflash.checkpoint.latent import SCALE_BYTES, SCALED, Latent
from sglang_dflash.checkpoint.target_config import RecurrentShape, TargetGeometry
from sglang_dflash.checkpoint.tensors import expected_tensors
from sglang_dflash.drafting.options import ResolvedOptions

# itemsize of the dtypes of K/V. Weights, and states of a convolution, are bfloat16 where no server
# tells otherwise; recurrent states are float32.
KV_DTYPES: Mapping[str, int] = {
    "bfloat16": 2,
    "float16": 2,
    "float32": 4,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
}
_BF16, _FP32 = KV_DTYPES["bfloat16"], KV_DTYPES["float32"]

# Bytes of a ring's tags: for each entry whose it is, and whether it is in use; for each target slot
# which entry it has.
BYTES_PER_ENTRY, BYTES_PER_TARGET_SLOT = 5, 4

# --swa-full-tokens-ratio, where it is not given.
SLIDING_SHARE = Fraction(8, 10)


class Charge(NamedTuple):
    """Bytes of draft K/V: at once, and for each token of the target's pool."""

    once: int
    per_token: int

    def total(self, kv_tokens: int) -> int:
        return self.once + self.per_token * kv_tokens

    @classmethod
    def of(cls, groups: Iterable[GroupKVSize], kv_tokens: int) -> Charge:
        """Return the charge of the groups beside a pool of that many tokens."""
        charges = [group.charge(kv_tokens) for group in groups]
        return cls(sum(each.once for each in charges), sum(each.per_token for each in charges))


class GroupKVSize(NamedTuple):
    """Draft K/V of the layers of one reach.

    Attributes:
        token_bytes: of a token's K/V, over these layers.
        ring: entries of their ring; None if it cannot be one.
    """

    token_bytes: int
    ring: int | None

    def charge(self, kv_tokens: int) -> Charge:
        """Return the smaller charge beside a target pool of that many tokens: of an entry per
        target slot, or of a ring."""
        per_slot = Charge(0, self.token_bytes)
        if self.ring is None:
            return per_slot
        ring = Charge(self.ring * (self.token_bytes + BYTES_PER_ENTRY), BYTES_PER_TARGET_SLOT)
        return min(per_slot, ring, key=lambda charge: charge.total(kv_tokens))

    def entries(self, kv_tokens: int) -> int | None:
        """Entries beside a target pool of that many tokens; None for one per target slot: without a
        ring, or if the ring would take as many bytes."""
        return self.ring if self.charge(kv_tokens).once else None


def draft_kv_charge(groups: Sequence[GroupKVSize], fits: Callable[[Charge], int]) -> Charge:
    """Return the charge of draft K/V beside the largest pool of the target that fits: no more than
    this is allocated there.

    Args:
        fits: charge -> tokens of the target's pool beside it.
    """
    charge = Charge.of(groups, 0)
    # A group's ring leaves more tokens, beside which another group may have one, too.
    for _ in groups:
        charge = Charge.of(groups, fits(charge))
    return charge


def draft_kv(
    config: DraftConfig,
    options: ResolvedOptions,
    carried: int,
    *,
    itemsize: int,
    ranks: int,
    hierarchical: bool,
    disaggregated: bool,
) -> tuple[GroupKVSize, ...]:
    """Return a rank's draft K/V, one value for each of `config.groups(options.reach)`.

    Args:
        config: of the whole draft.
        carried: requests that rings are for.
        itemsize: bytes of a number of draft K/V.
        ranks: of the tensor-parallel group.
        hierarchical: whether cached prefixes go to host memory and come back.
        disaggregated: whether draft K/V of prompts goes to another server, page by page as the
            target's, so that no group has a ring.

    Raises:
        ConfigError: the ranks do not divide the draft.
    """
    # With a hierarchical cache: tags, with an entry per slot, too; and `HostTier._generations`.
    tags = BYTES_PER_ENTRY + 2 * BYTES_PER_TARGET_SLOT if hierarchical else 0
    shape = config.of_rank(ranks).kv_shape
    return tuple(
        GroupKVSize(
            math.prod(group.kv_shape(shape)) * itemsize + tags,
            None if disaggregated else options.ring_entries(group.reach, carried),
        )
        for group in config.groups(options.reach)
    )


def embedding_bytes(geometry: TargetGeometry, *, tied: bool) -> int:
    """Bytes of a target's embeddings and lm_head in bfloat16, one matrix if they are tied."""
    return (1 if tied else 2) * _BF16 * geometry.vocab_size * geometry.hidden_size


def draft_weight_bytes(config: DraftConfig) -> int:
    """Return the bytes of a draft in bfloat16, without what it borrows from the target."""
    return _BF16 * sum(map(math.prod, expected_tensors(config).values()))


class HeadBytes(NamedTuple):
    """Bytes that a proposal reads beyond those of a v1 draft with the same layers.

    Attributes:
        once: weights of the head but its tables.
        per_request: rows of its tables.
    """

    once: int
    per_request: int


def head_bytes(config: DraftConfig, draft_block: int, itemsize: int) -> HeadBytes:
    """Return a rank's head bytes. They are not sharded: each rank holds all of these weights.

    Args:
        draft_block: B, tokens of the block that the draft fills.
        itemsize: bytes of a weight.
    """
    once, rows = config.head.weights(config), config.head.row_values
    return HeadBytes(itemsize * once, itemsize * (draft_block - 1) * rows)


def target_kv_bytes(target: TargetGeometry, itemsize: int) -> int:
    """Return the bytes of one token's K and V, or of its latent, over all attention layers. A pool
    of sliding layers has `SLIDING_SHARE` of the tokens of the other."""
    if target.latent is not None:
        latent = target.latent
        of_layer = _latent_bytes(latent, itemsize)
        return target.attention_layers * of_layer + latent.indexers * latent.index_bytes
    elements = 2 * target.num_key_value_heads * target.head_dim
    layers = target.attention_layers - (1 - SLIDING_SHARE) * target.sliding_layers
    return int(layers * elements * itemsize)


def _latent_bytes(latent: Latent, itemsize: int) -> int:
    """Bytes of a token's latent in one layer, as SGLang keeps it on an H100: with sparse attention
    in 8 bits, the compressed part has scales, and the rotary key stays in 16 bits."""
    if latent.indexers and itemsize == KV_DTYPES["fp8_e4m3"]:
        scales = latent.compressed // SCALED * SCALE_BYTES
        return latent.compressed + scales + latent.rotary * _BF16
    return (latent.compressed + latent.rotary) * itemsize


def state_bytes(shape: RecurrentShape) -> int:
    """Return the bytes of one request's recurrent state and convolution window, over all recurrent
    layers."""
    return shape.layers * (shape.state * _FP32 + shape.channels * shape.window * _BF16)


def snapshot_bytes(shape: RecurrentShape, verify_block: int) -> int:
    """Scratch of one request's rollback by snapshots: a state per block position, and convolution
    inputs."""
    conv_inputs = shape.channels * (verify_block + shape.window - 1)
    return shape.layers * (verify_block * shape.state * _FP32 + conv_inputs * _BF16)


def replay_bytes(
    shape: RecurrentShape,
    verify_block: int,
    *,
    itemsize: int = _BF16,
    gate_itemsize: int = _BF16,
) -> int:
    """Scratch of one request's rollback by replay: the block's convolution inputs and the window
    before them, and the inputs of two gates per token and value head.

    Args:
        itemsize: of the convolution's inputs.
        gate_itemsize: of the gates' inputs.
    """
    windows = shape.channels * (verify_block + shape.window - 1 + shape.window) * itemsize
    return shape.layers * (windows + 2 * verify_block * shape.value_heads * gate_itemsize)
