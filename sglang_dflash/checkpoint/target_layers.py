"""The layers of a target whose outputs a draft reads."""

from __future__ import annotations

from sglang_dflash.checkpoint.fields import Fields
from sglang_dflash.common.errors import ConfigError


def read_target_layer_ids(
    fields: Fields, num_target_layers: int | None, depth: int
) -> tuple[int, ...]:
    """Return the layers that a draft's config.json names, else the default ones. Raises
    ConfigError."""
    if "target_layer_ids" in fields:
        return fields.layer_ids("target_layer_ids", num_target_layers)
    if num_target_layers is None:
        raise fields.error("num_target_layers", "without target_layer_ids a positive integer")
    return default_target_layer_ids(num_target_layers, depth)


def default_target_layer_ids(num_target_layers: int, depth: int) -> tuple[int, ...]:
    """Spread `depth` layers evenly from the second to the third-last target layer.

    From DFlash, arXiv 2602.06036, section 5.
    """
    if depth == 1:
        return (num_target_layers // 2,)
    first, last = 1, num_target_layers - 3
    if last < first:
        required = f"too few to read {depth} target layers; target_layer_ids are required"
        raise ConfigError(
            "num_target_layers in the draft's config.json", num_target_layers, required
        )
    return tuple(round(first + i * (last - first) / (depth - 1)) for i in range(depth))
