"""The fewest bytes that a step of the drafter must move, from the draft's config only.

Every weight once; lm_head once; the visible K/V of every layer once; of every matrix product the
input and the output once; the logits written and read once. Whatever lies between two products,
such as a norm, is free: it could be part of one of them. On one rank.

Letters: R requests, B block positions, N = R * B tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

from sglang_dflash.facts.draft_config import DraftConfig, LayerAttention

ID_BYTES = 8


def propose_floor(
    config: DraftConfig, lengths: Sequence[int], window: int | None, itemsize: int = 2
) -> int:
    """Bytes of drafting one block for each request.

    Args:
        lengths: committed tokens of the requests.
        window: last tokens that the draft reads; None for all.
        itemsize: bytes of a weight, an activation and an element of the cache.
    """
    block = config.block_size
    tokens, drafted = len(lengths) * block, len(lengths) * (block - 1)
    wide, inner = config.hidden_size, config.intermediate_size
    heads = config.num_attention_heads * config.head_dim
    kv = config.num_key_value_heads * config.head_dim
    weights = config.num_hidden_layers * (
        _products(wide, heads + 2 * kv) + _products(heads, wide)
        + _products(wide, 2 * inner) + _products(inner, wide)
        + 2 * wide + 2 * config.head_dim
        + config.attention_bias * (heads + 2 * kv + wide)
    ) + wide + config.vocab_size * wide  # fmt: skip
    activations = tokens * config.num_hidden_layers * (
        wide + heads + 2 * kv + heads + wide + wide + 2 * inner + inner + wide
    ) + drafted * wide  # fmt: skip
    context = sum(visible(layer, length, window) for layer in config.layers for length in lengths)
    logits = 2 * drafted * config.vocab_size
    embedded = tokens * wide
    values = weights + activations + 2 * kv * context + logits + embedded
    return itemsize * values + ID_BYTES * tokens


def visible(layer: LayerAttention, length: int, window: int | None) -> int:
    """Committed tokens that some position of the block sees in a layer."""
    seen = length if window is None else min(length, window)
    # The block's first position sees the most of them, and itself.
    return seen if layer.sliding_window is None else min(seen, layer.sliding_window - 1)


def absorb_floor(config: DraftConfig, tokens: int, itemsize: int = 2) -> int:
    """Bytes of projecting the target's hidden states of `tokens` tokens to context K/V, and of
    storing that in the cache."""
    wide, target = config.hidden_size, config.target_hidden_width
    kv = config.num_hidden_layers * 2 * config.num_key_value_heads * config.head_dim
    weights = _products(target, wide) + wide + _products(wide, kv)
    weights += config.num_hidden_layers * config.head_dim + config.attention_bias * kv
    return itemsize * (weights + tokens * (target + wide + wide + kv + kv))


def commit_floor(requests: int, block: int) -> int:
    """Bytes of accepting blocks, and of finding entries for their tokens: drafted and target
    tokens; lengths and bonus tokens; the target slot of each token, its entry, and two tags of 4
    bytes."""
    return requests * (2 * ID_BYTES * block + 2 * ID_BYTES + block * (2 * ID_BYTES + 8))


def _products(width_in: int, width_out: int) -> int:
    return width_in * width_out
