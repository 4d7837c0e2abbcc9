"""A target's geometry as far as memory is concerned, from its config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sglang_dflash.checkpoint.fields import Fields, read_json_object
from sglang_dflash.checkpoint.latent import Latent, read_latent
from sglang_dflash.common.errors import ConfigError

# Architectures whose sliding layers get a KV pool of their own from SGLang and are shaped like the
# others. The sliding layers of further ones are counted as if they kept every token.
_POOLED = ("GptOssForCausalLM", "LagunaForCausalLM", "MellumForCausalLM")
# The layers of a Nemotron-H, by their letters in `hybrid_override_pattern`.
_BLOCKS = {"*": "attention", "M": "mamba", "-": "mlp", "E": "moe"}
# Parts of the names of recurrent layers in `layer_types`.
_RECURRENT_TYPES = ("linear", "mamba", "conv")
_RECURRENT_FIELDS = (
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
)
# Fields that give a target's context, the first that is there.
_CONTEXTS = (
    "max_sequence_length", "seq_length", "max_seq_len", "model_max_length",
    "max_position_embeddings",
)  # fmt: skip
# Kinds of rotary scaling that Transformers reads as made for the context that the config gives.
_FOR_CONTEXT = ("llama3", "yarn", "longrope")


@dataclass(frozen=True)
class RecurrentShape:
    """A rank's part of a target's Gated DeltaNet layers.

    Attributes:
        channels: C, of the convolution.
        window: W - 1, inputs that the convolution keeps of each channel.
        value_heads, value_dim, key_dim: HV, V and K of a state.
    """

    layers: int
    channels: int
    window: int
    value_heads: int
    value_dim: int
    key_dim: int

    @property
    def state(self) -> int:
        """Numbers of a layer's state."""
        return self.value_heads * self.value_dim * self.key_dim


@dataclass(frozen=True)
class TargetGeometry:
    """The fields of a target's config.json that decide the size of its KV and recurrent states.

    Attributes:
        attention_layers: layers that keep K/V, sliding ones included.
        sliding_layers: of these, those that have a KV pool of their own.
        recurrent_layers: layers of linear attention or a short convolution, which keep a state per
            request and nothing per token.
        recurrent: shape of the recurrent layers; None if there are none or the config does not
            give it.
        latent: what multi-head latent attention (MLA) keeps in place of K and V; None for other
            targets.
    """

    hidden_size: int
    vocab_size: int
    num_hidden_layers: int
    attention_layers: int
    recurrent_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    recurrent: RecurrentShape | None
    latent: Latent | None = None
    sliding_layers: int = 0

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
        depth, attention, recurrent = _layers(text)
        heads, hidden = text.positive_int("num_attention_heads"), text.positive_int("hidden_size")
        return cls(
            hidden_size=hidden,
            vocab_size=text.positive_int("vocab_size"),
            num_hidden_layers=depth,
            attention_layers=attention,
            recurrent_layers=recurrent,
            num_attention_heads=heads,
            num_key_value_heads=text.positive_int("num_key_value_heads", default=heads),
            head_dim=text.positive_int("head_dim", default=hidden // heads),
            recurrent=_recurrent_shape(text, recurrent),
            latent=read_latent(raw, text, depth),
            sliding_layers=_sliding_layers(raw, text, depth),
        )

    def of_rank(self, ranks: int) -> TargetGeometry:
        """A rank's part: heads, K/V heads, of which each rank keeps at least one, and recurrent
        heads; a latent is whole on each.

        Raises:
            ConfigError: the ranks do not divide the heads.
        """
        shape = self.recurrent
        if shape is not None:
            heads = share_of_rank("target's linear_num_value_heads", shape.value_heads, ranks)
            shape = replace(shape, channels=shape.channels // ranks, value_heads=heads)
        kv_heads = kv_heads_of_rank("target", self.num_key_value_heads, ranks)
        heads = max(1, self.num_attention_heads // ranks)
        return replace(
            self, num_attention_heads=heads, num_key_value_heads=kv_heads, recurrent=shape
        )


def context_of(raw: Mapping[str, Any]) -> int | None:
    """Return the tokens of a request, at most, by a target's config.json, as SGLang's
    `get_context_length` reads it; None if the config does not tell. Raises ConfigError."""
    text = Fields.of(raw, "target")
    name = next((name for name in _CONTEXTS if name in text), None)
    if name is None:
        return None
    scaling = text.block("rope_scaling")
    if not scaling.values:
        scaling = text.block("rope_parameters")
    rope_type = scaling.get("rope_type") or scaling.get("type")
    is_counted = rope_type in _FOR_CONTEXT or "original_max_position_embeddings" in scaling
    factor = 1 if is_counted else scaling.positive_number("factor", default=1)
    return int(factor * text.positive_int(name))


def share_of_rank(quantity: str, total: int, ranks: int) -> int:
    """Raises ConfigError if the ranks do not divide it."""
    if total % ranks:
        raise ConfigError("tp_size", ranks, f"it does not divide the {quantity} ({total})")
    return total // ranks


def kv_heads_of_rank(model: str, heads: int, ranks: int) -> int:
    """Return the K/V heads of a rank. With fewer heads than ranks each rank has one, and some share
    it.

    Raises:
        ConfigError: neither number divides the other.
    """
    if ranks > heads and ranks % heads == 0:
        return 1
    return share_of_rank(f"{model}'s num_key_value_heads", heads, ranks)


def _sliding_layers(raw: Mapping[str, Any], text: Fields, depth: int) -> int:
    architectures = raw.get("architectures")
    named = architectures if isinstance(architectures, list) else []
    if not any(name in named for name in _POOLED):
        return 0
    types = text.layer_types(depth)
    if types is None:
        # gpt-oss by default: every second layer, the first one included.
        return (depth + 1) // 2 if "GptOssForCausalLM" in named else 0
    return types.count("sliding_attention")


def _layers(text: Fields) -> tuple[int, int, int]:
    """The number of layers, of those that keep K/V, and of recurrent ones."""
    blocks = _blocks(text)
    if blocks:
        return len(blocks), blocks.count("attention"), blocks.count("mamba")
    depth = text.positive_int("num_hidden_layers")
    recurrent = _recurrent_layers(text, depth)
    return depth, depth - recurrent, recurrent


def _blocks(text: Fields) -> tuple[str, ...]:
    """The layers of a Nemotron-H as SGLang's `NemotronHConfig` reads them, whatever
    num_hidden_layers says; none of another target."""
    if not str(text.get("model_type")).startswith("nemotron_h"):
        return ()
    name = "layers_block_type" if "layers_block_type" in text else "hybrid_override_pattern"
    if name == "layers_block_type":
        blocks = text.words(name)
    else:
        blocks = tuple(_BLOCKS.get(letter, "") for letter in text.word(name) or "")
    if not set(blocks) <= set(_BLOCKS.values()) or "attention" not in blocks:
        kinds = ", ".join(f"{block_type} ({letter})" for letter, block_type in _BLOCKS.items())
        raise text.error(name, f"layers of the kinds {kinds}, with attention among them,")
    return blocks


def _recurrent_layers(text: Fields, depth: int) -> int:
    types = text.layer_types(depth)
    if types is not None:
        return sum(any(part in layer_type for part in _RECURRENT_TYPES) for layer_type in types)
    if "full_attn_idxs" in text:  # LFM2
        return depth - len(text.layer_ids("full_attn_idxs", depth))
    kimi = text.block("linear_attn_config")
    if "kda_layers" in kimi:  # Counted from 1.
        return len(kimi.layer_ids("kda_layers", depth + 1))
    if "full_attention_interval" not in text:
        return 0
    return depth - depth // text.positive_int("full_attention_interval")


def _recurrent_shape(text: Fields, layers: int) -> RecurrentShape | None:
    if not layers or any(name not in text for name in _RECURRENT_FIELDS):
        return None
    key_heads, value_heads, key_dim, value_dim, kernel = map(text.positive_int, _RECURRENT_FIELDS)
    channels = 2 * key_heads * key_dim + value_heads * value_dim
    return RecurrentShape(layers, channels, kernel - 1, value_heads, value_dim, key_dim)
