"""A target's shape as far as memory is concerned, from its config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sglang_dflash.checkpoint.errors import ConfigError


@dataclass(frozen=True)
class RecurrentShape:
    """A target's Gated DeltaNet layers. Bytes are of one request over all of them: states float32, convolution and gates bfloat16."""

    layers: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_kernel: int

    @property
    def _channels(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def _matrices(self) -> int:
        return self.value_heads * self.value_dim * self.key_dim * 4

    @property
    def state_bytes(self) -> int:
        """The state and the convolution's window."""
        return self.layers * (self._matrices + self._channels * (self.conv_kernel - 1) * 2)

    def snapshot_bytes(self, block_size: int) -> int:
        """What verification keeps to roll back by snapshots: the state after every token of the block, and its convolution inputs."""
        return self.layers * (
            block_size * self._matrices + self._channels * (block_size + self.conv_kernel - 2) * 2
        )

    def replay_bytes(self, block_size: int) -> int:
        """By replay: the block's convolution inputs, the window before them, and its gate inputs."""
        window = self.conv_kernel - 1
        return (
            self.layers
            * 2
            * (
                self._channels * (block_size + window - 1 + window)
                + 2 * block_size * self.value_heads
            )
        )


@dataclass(frozen=True)
class TargetGeometry:
    """A target's KV-relevant shape, from a Hugging Face config.json.

    `attention_layers`: layers that keep K/V of every token; a sliding layer is counted as one, which is an upper bound.
    `recurrent_layers`: linear-attention (GDN) layers, which keep a state per request and nothing per token.
    `recurrent`: their shape (None: there are none, or the config does not tell).
    """

    hidden_size: int
    vocab_size: int
    num_hidden_layers: int
    attention_layers: int
    recurrent_layers: int
    num_key_value_heads: int
    head_dim: int
    recurrent: RecurrentShape | None

    @property
    def recurrent_state_bytes(self) -> int | None:
        """Of one request; None where the config does not tell."""
        if not self.recurrent_layers:
            return 0
        return None if self.recurrent is None else self.recurrent.state_bytes

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> TargetGeometry:
        """Raises ConfigError where a field is missing, is no positive integer, or says that K/V are kept in another form (MLA)."""
        text = {**raw, **(raw.get("text_config") or {})}
        if text.get("kv_lora_rank"):
            raise ConfigError(
                f"kv_lora_rank: {text['kv_lora_rank']!r}; the KV size of MLA targets is not known here"
            )
        depth, heads = positive(text, "num_hidden_layers"), positive(text, "num_attention_heads")
        hidden = positive(text, "hidden_size")
        recurrent = _recurrent_layers(text, depth)
        return cls(
            hidden_size=hidden,
            vocab_size=positive(text, "vocab_size"),
            num_hidden_layers=depth,
            attention_layers=depth - recurrent,
            recurrent_layers=recurrent,
            num_key_value_heads=positive(text, "num_key_value_heads", default=heads),
            head_dim=positive(text, "head_dim", default=hidden // heads),
            recurrent=_recurrent_shape(text, recurrent),
        )

    def kv_bytes_per_token(self, dtype_bytes: int) -> int:
        return self.attention_layers * 2 * self.num_key_value_heads * self.head_dim * dtype_bytes


def _recurrent_layers(text: Mapping[str, Any], depth: int) -> int:
    types = text.get("layer_types")
    if types is not None:
        if len(types) != depth:
            raise ConfigError(
                f"layer_types: {len(types)} entries for {depth} layers; one per layer is required"
            )
        return sum("linear" in kind or "mamba" in kind for kind in types)
    interval = text.get("full_attention_interval")
    if interval is None:
        return 0
    return depth - depth // positive(text, "full_attention_interval")


def _recurrent_shape(text: Mapping[str, Any], layers: int) -> RecurrentShape | None:
    names = (
        "linear_num_key_heads",
        "linear_num_value_heads",
        "linear_key_head_dim",
        "linear_value_head_dim",
        "linear_conv_kernel_dim",
    )
    if not layers or any(text.get(name) is None for name in names):
        return None
    return RecurrentShape(layers, *(positive(text, name) for name in names))


def positive(raw: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """Field `name` of a config.json, or `default` where it is absent. Raises ConfigError."""
    value = raw.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(
            f"{name}: {'missing' if value is None else repr(value)} in the config.json; a positive integer is required"
        )
    return value
