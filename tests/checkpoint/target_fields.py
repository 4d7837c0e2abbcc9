"""config.json of a toy target, for tests."""

from __future__ import annotations

from typing import Any

# config.json of a target that `raw_config()` fits, and the fields of Gated DeltaNet layers.
TARGET: dict[str, Any] = {
    "hidden_size": 32,
    "vocab_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
GDN = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 3,
    "linear_key_head_dim": 5,
    "linear_value_head_dim": 7,
    "linear_conv_kernel_dim": 4,
}
