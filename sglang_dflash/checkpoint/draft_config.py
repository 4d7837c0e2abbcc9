"""What a draft checkpoint says of itself (`DraftConfig`) and how we were asked to run it (`Options`).

Both are frozen and validate themselves: nothing downstream reads a raw dictionary or holds a default of its own.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sglang_dflash.checkpoint.errors import ConfigError, UnsupportedDraft


@dataclass(frozen=True)
class LayerAttention:
    """How one draft layer attends.

    `sliding_window`: tokens back from the query, itself included, that it sees; None for all of the context.
    `causal`: whether a block position sees only the block positions up to itself.
    """

    sliding_window: int | None
    causal: bool


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding: base `theta` and the checkpoint's scaling entry (empty for none)."""

    theta: float
    scaling: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class DraftConfig:
    """A DFlash (v1) draft checkpoint's geometry, in the field names of its config.json."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    block_size: int
    mask_token_id: int
    num_target_layers: int
    target_layer_ids: tuple[int, ...]
    layers: tuple[LayerAttention, ...]
    attention_bias: bool = False

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> DraftConfig:
        """Read `folder/config.json`.

        Raises:
            ConfigError: the folder or file is missing, is not JSON, or holds an invalid field.
            UnsupportedDraft: the checkpoint needs a drafter head that is not implemented here.
        """
        path = Path(folder) / "config.json"
        if not path.is_file():
            raise ConfigError(
                f"draft checkpoint: no config.json in {str(folder)!r}; give the folder of a DFlash draft"
            )
        try:
            raw = json.loads(path.read_text())
        except json.JSONDecodeError as error:
            raise ConfigError(
                f"draft checkpoint: {str(path)!r} is not valid JSON ({error})"
            ) from error
        return cls.from_dict(raw)

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> DraftConfig:
        """Build from a parsed config.json; see `from_pretrained` for the errors."""
        own = dict(raw.get("dflash_config") or {})
        text = {**raw, **(raw.get("text_config") or {})}
        _refuse_other_heads(text, own)
        either = {**text, **own}
        hidden, heads = _positive(text, "hidden_size"), _positive(text, "num_attention_heads")
        depth = _positive(text, "num_hidden_layers")
        block_size = _positive(either, "block_size", default=16)
        if block_size < 2:
            raise ConfigError(
                f"block_size: {block_size} drafts nothing; a block is the bonus token and at least 1 drafted token"
            )
        num_target_layers = _positive(either, "num_target_layers")
        config = cls(
            hidden_size=hidden,
            intermediate_size=_positive(text, "intermediate_size"),
            num_hidden_layers=depth,
            num_attention_heads=heads,
            num_key_value_heads=_positive(text, "num_key_value_heads", default=heads),
            head_dim=_positive(text, "head_dim", default=hidden // heads),
            vocab_size=_positive(text, "vocab_size"),
            rms_norm_eps=float(text.get("rms_norm_eps", 1e-6)),
            rope=_rope(text),
            max_position_embeddings=_positive(text, "max_position_embeddings", default=32768),
            block_size=block_size,
            mask_token_id=_mask_token_id(either),
            num_target_layers=num_target_layers,
            target_layer_ids=_target_layer_ids(either, num_target_layers, depth),
            layers=_layer_attention(text, depth),
            attention_bias=bool(text.get("attention_bias", False)),
        )
        if config.num_attention_heads % config.num_key_value_heads:
            raise ConfigError(
                f"num_key_value_heads: {config.num_key_value_heads} does not divide num_attention_heads ({heads})"
            )
        if config.mask_token_id >= config.vocab_size:
            raise ConfigError(
                f"dflash_config.mask_token_id: {config.mask_token_id} is outside the vocabulary of {config.vocab_size}"
            )
        return config

    @property
    def num_features(self) -> int:
        """Width of one token's context features: the target layers' hidden states, side by side."""
        return len(self.target_layer_ids) * self.hidden_size

    @property
    def kv_shape(self) -> tuple[int, int, int, int]:
        """Draft K/V of one token: `(layers, 2, kv heads, head dim)`."""
        return (self.num_hidden_layers, 2, self.num_key_value_heads, self.head_dim)

    def check_target(self, *, hidden_size: int, vocab_size: int, num_layers: int) -> None:
        """Raise ConfigError unless this draft was made for a target of that geometry."""
        if hidden_size != self.hidden_size:
            raise ConfigError(
                f"hidden_size: the draft's is {self.hidden_size}, the target's {hidden_size}; "
                "they share embedding and lm_head and must be equal"
            )
        if vocab_size != self.vocab_size:
            raise ConfigError(
                f"vocab_size: the draft's is {self.vocab_size}, the target's {vocab_size}; they must be equal"
            )
        if num_layers != self.num_target_layers:
            raise ConfigError(
                f"num_target_layers: the draft was trained on {self.num_target_layers} target layers, this target has {num_layers}"
            )


def _positive(raw: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = raw.get(name, default)
    if value is None:
        raise ConfigError(
            f"{name}: missing from the draft's config.json; a positive integer is required"
        )
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(
            f"{name}: {value!r} in the draft's config.json; a positive integer is required"
        )
    return value


def _mask_token_id(either: Mapping[str, Any]) -> int:
    value = either.get("mask_token_id")
    if value is None:
        raise UnsupportedDraft(
            "dflash_config.mask_token_id: missing; drafts that name their mask token by text are not served here"
        )
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ConfigError(
            f"dflash_config.mask_token_id: {value!r}; a token id (integer, 0 or more) is required"
        )
    return value


def _target_layer_ids(
    either: Mapping[str, Any], num_target_layers: int, depth: int
) -> tuple[int, ...]:
    ids = either.get("target_layer_ids")
    if ids is None:
        return default_target_layer_ids(num_target_layers, depth)
    if not isinstance(ids, list | tuple) or not ids or not all(isinstance(i, int) for i in ids):
        raise ConfigError(
            f"dflash_config.target_layer_ids: {ids!r}; a non-empty list of layer numbers is required"
        )
    outside = [i for i in ids if not 0 <= i < num_target_layers]
    if outside:
        raise ConfigError(
            f"dflash_config.target_layer_ids: {outside} outside the target's layers 0 to {num_target_layers - 1}"
        )
    return tuple(ids)


def default_target_layer_ids(num_target_layers: int, depth: int) -> tuple[int, ...]:
    """Spread `depth` layers evenly from the second to the third-last target layer (DFlash, arXiv 2602.06036, section 5)."""
    if depth == 1:
        return (num_target_layers // 2,)
    first, last = 1, num_target_layers - 3
    if last < first:
        raise ConfigError(
            f"num_target_layers: {num_target_layers} is too few to spread {depth} context features; name target_layer_ids"
        )
    return tuple(round(first + i * (last - first) / (depth - 1)) for i in range(depth))


def _layer_attention(text: Mapping[str, Any], depth: int) -> tuple[LayerAttention, ...]:
    is_causal = text.get("is_causal")
    types = text.get("layer_types") or ["full_attention"] * depth
    if len(types) != depth:
        raise ConfigError(
            f"layer_types: {len(types)} entries for {depth} layers; one per layer is required"
        )
    window = text.get("sliding_window")
    layers = []
    for i, kind in enumerate(types):
        if kind == "full_attention":
            layers.append(LayerAttention(None, causal=bool(is_causal)))
        elif kind == "sliding_attention":
            if not isinstance(window, int) or window < 1:
                raise ConfigError(
                    f"sliding_window: {window!r}, but layer_types[{i}] is sliding_attention; a positive integer is required"
                )
            layers.append(LayerAttention(window, causal=is_causal is not False))
        else:
            raise UnsupportedDraft(
                f"layer_types[{i}]: {kind!r}; full_attention and sliding_attention are served"
            )
    return tuple(layers)


# Fields of each kind of rotary scaling: those that a config.json must have, and those that it may.
_ROPE_FIELDS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "llama3": (
        ("factor", "low_freq_factor", "high_freq_factor"),
        ("original_max_position_embeddings",),
    ),
    "yarn": (
        ("factor",),
        (
            "original_max_position_embeddings",
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
            "truncate",
        ),
    ),
}
# Where 0 stands for "not given".
_ROPE_OR_ZERO = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim")


def _rope(text: Mapping[str, Any]) -> RopeConfig:
    block = "rope_scaling" if text.get("rope_scaling") else "rope_parameters"
    given = {
        k: v
        for k, v in (text.get(block) or {}).items()
        if v is not None and not (v == 0 and k in _ROPE_OR_ZERO)
    }
    older_name, kind = given.pop("type", "default"), given.pop("rope_type", None)
    kind = kind or older_name
    if kind not in _ROPE_FIELDS:
        raise UnsupportedDraft(
            f"{block}.rope_type: {kind!r}; default, linear, yarn and llama3 are served"
        )
    shares = given.pop("partial_rotary_factor", 1.0), text.get("partial_rotary_factor") or 1.0
    if any(float(share) != 1.0 for share in shares) or "mrope_section" in given:
        raise UnsupportedDraft(
            "partial_rotary_factor / mrope_section: drafts with a partial or multi-axis rotary embedding are not served here"
        )
    for name in ("rope_is_neox_style", "is_neox_style"):
        if text.get(name) is False:
            raise UnsupportedDraft(
                f"{name}: False; rotary embeddings that pair adjacent dimensions are not served here"
            )
    thetas = (
        given.pop("rope_theta", None),
        text.get("rope_theta"),
        (text.get("rope_parameters") or {}).get("rope_theta"),
    )
    theta = next((theta for theta in thetas if theta is not None), 10000.0)
    _check_positive_number("rope_theta", theta)
    original = text.get("original_max_position_embeddings")
    if original is not None and kind in ("llama3", "yarn"):
        given["original_max_position_embeddings"] = original
    _check_rope_fields(block, kind, given)
    return RopeConfig(float(theta), {} if kind == "default" else {**given, "rope_type": kind})


def _check_rope_fields(block: str, kind: str, given: Mapping[str, Any]) -> None:
    required, optional = _ROPE_FIELDS[kind]
    for name, value in given.items():
        if name not in (*required, *optional):
            raise UnsupportedDraft(
                f"{block}.{name}: {value!r}; with rope_type {kind!r} this field is not served here"
            )
    for name in dict.fromkeys((*required, *given)):
        if name != "truncate":
            _check_positive_number(f"{block}.{name}", given.get(name))
        elif not isinstance(given[name], bool):
            raise ConfigError(
                f"{block}.{name}: {given[name]!r} in the draft's config.json; true or false is required"
            )
    if kind == "llama3" and given["high_freq_factor"] <= given["low_freq_factor"]:
        raise ConfigError(
            f"{block}.high_freq_factor: {given['high_freq_factor']} is not above low_freq_factor ({given['low_freq_factor']})"
        )


def _check_positive_number(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        shown = "missing from" if value is None else f"{value!r} in"
        raise ConfigError(f"{name}: {shown} the draft's config.json; a positive number is required")


def _refuse_other_heads(text: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Drafts beyond DFlash v1 are somebody else's to serve: name the first thing that says so."""
    either = {**text, **own}
    for name in (
        "selector_rank",
        "selector_top_k",
        "conv_kernel_size",
        "projector_type",
        "attention_sink_bias",
        "attention_value_scale",
    ):
        if either.get(name):
            raise UnsupportedDraft(
                f"{name}: {either[name]!r}; only the DFlash v1 head is served here"
            )
    for name in ("output_multiplier", "final_logit_softcapping"):
        if either.get(name) not in (None, 0, 1, 1.0, 0.0):
            raise UnsupportedDraft(
                f"{name}: {either[name]!r}; only the DFlash v1 head is served here"
            )
    for name in ("has_embed_tokens", "use_gemma_norm", "quantization_config"):
        if text.get(name):
            raise UnsupportedDraft(f"{name}: {text[name]!r}; drafts with this are not served here")
    if text.get("hidden_act", "silu") != "silu":
        raise UnsupportedDraft(f"hidden_act: {text['hidden_act']!r}; silu is served")
