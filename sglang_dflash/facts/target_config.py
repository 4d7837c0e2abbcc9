"""A target's geometry as far as memory is concerned, from its config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_dflash.facts.fields import Fields, read_json_object

_RECURRENT_FIELDS = (
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
)


@dataclass(frozen=True)
class RecurrentShape:
    """A target's Gated DeltaNet layers.

    Byte counts are of one request over all of these layers: recurrent states in float32,
    convolution inputs and gate inputs in bfloat16.
    """

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
    def _matrix_bytes(self) -> int:
        return self.value_heads * self.value_dim * self.key_dim * 4

    @property
    def state_bytes(self) -> int:
        """The recurrent state and the convolution window."""
        return self.layers * (self._matrix_bytes + self._channels * (self.conv_kernel - 1) * 2)

    def snapshot_bytes(self, block_size: int) -> int:
        """Scratch of rollback by snapshots: a state per block position, and convolution inputs."""
        conv_inputs = self._channels * (block_size + self.conv_kernel - 2)
        return self.layers * (block_size * self._matrix_bytes + 2 * conv_inputs)

    def replay_bytes(self, block_size: int) -> int:
        """Scratch of rollback by replay: the block's convolution inputs with the window before
        them, and its gate inputs."""
        window = self.conv_kernel - 1
        conv_inputs = self._channels * (block_size + window - 1 + window)
        gate_inputs = 2 * block_size * self.value_heads
        return self.layers * 2 * (conv_inputs + gate_inputs)


@dataclass(frozen=True)
class TargetGeometry:
    """The fields of a target's config.json that decide the size of its KV and recurrent states.

    Attributes:
        attention_layers: layers that keep K/V of every token. A sliding layer counts as one, which
            is an upper bound.
        recurrent_layers: linear-attention layers, which keep a state per request and nothing per
            token.
        recurrent: shape of the recurrent layers; None if there are none or the config does not
            give it.
        latent_width: elements of one token that a layer of multi-head latent attention (MLA) keeps
            in place of K and V; None for other targets.
    """

    hidden_size: int
    vocab_size: int
    num_hidden_layers: int
    attention_layers: int
    recurrent_layers: int
    num_key_value_heads: int
    head_dim: int
    recurrent: RecurrentShape | None
    latent_width: int | None = None

    @property
    def recurrent_state_bytes(self) -> int | None:
        """Bytes of one request; None if the config does not give the shape."""
        if not self.recurrent_layers:
            return 0
        return None if self.recurrent is None else self.recurrent.state_bytes

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> TargetGeometry:
        """Read `folder/config.json`.

        Raises:
            ConfigError: the folder or file is missing, is not JSON, or holds an invalid field.
        """
        return cls.from_dict(read_json_object(Path(folder) / "config.json", "target checkpoint"))

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> TargetGeometry:
        """Build from a parsed config.json.

        Raises:
            ConfigError: a field is missing or invalid.
        """
        text = Fields.of(raw, "target")
        depth, heads = (
            text.positive_int("num_hidden_layers"),
            text.positive_int("num_attention_heads"),
        )
        hidden = text.positive_int("hidden_size")
        recurrent = _recurrent_layers(text, depth)
        return cls(
            hidden_size=hidden,
            vocab_size=text.positive_int("vocab_size"),
            num_hidden_layers=depth,
            attention_layers=depth - recurrent,
            recurrent_layers=recurrent,
            num_key_value_heads=text.positive_int("num_key_value_heads", default=heads),
            head_dim=text.positive_int("head_dim", default=hidden // heads),
            recurrent=_recurrent_shape(text, recurrent),
            latent_width=_latent_width(text),
        )

    def kv_bytes_per_token(self, dtype_bytes: int) -> int:
        """Bytes of one token's K and V, or of its latent, over all attention layers."""
        elements = self.latent_width or 2 * self.num_key_value_heads * self.head_dim
        return self.attention_layers * elements * dtype_bytes


def _latent_width(text: Fields) -> int | None:
    """The compressed K/V and the rotary key of MLA, as SGLang's `MLATokenToKVPool` keeps them."""
    if "kv_lora_rank" not in text:
        return None
    return text.positive_int("kv_lora_rank") + text.positive_int("qk_rope_head_dim")


def _recurrent_layers(text: Fields, depth: int) -> int:
    types = text.layer_types(depth)
    if types is not None:
        return sum("linear" in kind or "mamba" in kind for kind in types)
    if "full_attention_interval" not in text:
        return 0
    return depth - depth // text.positive_int("full_attention_interval")


def _recurrent_shape(text: Fields, layers: int) -> RecurrentShape | None:
    if not layers or any(name not in text for name in _RECURRENT_FIELDS):
        return None
    return RecurrentShape(layers, *(text.positive_int(name) for name in _RECURRENT_FIELDS))
