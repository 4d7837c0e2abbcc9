"""The fewest bytes that the phases of a step can move, by a draft's config."""

from __future__ import annotations

from collections.abc import Sequence

from sglang_dflash.checkpoint.draft_config import DraftConfig, LayerAttention
from sglang_dflash.checkpoint.published import shipped

SHAPES = (
    "z-lab/Qwen3-8B-DFlash-b16",
    "z-lab/Qwen3.5-27B-DFlash",
    "z-lab/Qwen3.5-35B-A3B-DFlash",
    "z-lab/Qwen3.8-27B-DFlash2",
)
ID_BYTES = 8


def config_of(shape: str) -> DraftConfig:
    """Return the config of a shipped draft."""
    return DraftConfig.from_dict(shipped("draft")[shape].config)


def floors(
    config: DraftConfig, requests: int, context: int, window: int | None, itemsize: int = 2
) -> dict[str, int]:
    """Return the fewest bytes of each phase of a step."""
    return {
        "propose": propose_floor(config, [context] * requests, window, itemsize),
        "absorb": absorb_floor(config, requests * config.block_size, itemsize),
        "commit": commit_floor(requests, config.block_size),
    }


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
        wide * (heads + 2 * kv) + heads * wide + wide * 2 * inner + inner * wide
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
    head = config.head
    values += head.weights(config) + drafted * head.row_values
    values += head.moved(config, tokens, drafted)
    return itemsize * values + ID_BYTES * tokens


def visible(layer: LayerAttention, length: int, window: int | None) -> int:
    """Return the number of committed tokens that any position of the block sees in a layer."""
    in_window = length if window is None else min(length, window)
    # The block's first position sees the most committed tokens, and itself.
    return in_window if layer.sliding_window is None else min(in_window, layer.sliding_window - 1)


def absorb_floor(config: DraftConfig, tokens: int, itemsize: int = 2) -> int:
    """Bytes of projecting the target's hidden states of `tokens` tokens to context K/V, and of
    storing that in the cache."""
    wide, target = config.hidden_size, config.target_hidden_width
    kv = config.num_hidden_layers * 2 * config.num_key_value_heads * config.head_dim
    weights = target * wide + wide + wide * kv
    weights += config.num_hidden_layers * config.head_dim + config.attention_bias * kv
    return itemsize * (weights + tokens * (target + wide + wide + kv + kv))


def commit_floor(requests: int, block: int) -> int:
    """Bytes of accepting blocks, and of finding entries for their tokens: drafted and target
    tokens; lengths and bonus tokens; the target slot of each token, its entry, and two tags of 4
    bytes."""
    return requests * (2 * ID_BYTES * block + 2 * ID_BYTES + block * (2 * ID_BYTES + 8))
