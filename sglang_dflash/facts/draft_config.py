"""The config.json of a draft checkpoint as one validated value, `DraftConfig`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sglang_dflash.facts.errors import ConfigError, UnsupportedDraft
from sglang_dflash.facts.fields import Fields, read_json_object
from sglang_dflash.facts.other_fields import check_other_fields

_FILE = "the draft's config.json"
# Bounds far above any published draft, and below what makes the arithmetic of sizes overflow.
_MOST_LAYERS = 256
_MOST_WIDTH = 2**18
# Published drafts have 1e-6 and 1e-5.
_MOST_EPS = 0.1
# Fields that a DFlash v1 draft does not have, with any value but false, null, 0 or "".
_FLAGS = ("attention_sink_bias", "has_embed_tokens", "has_lm_head", "use_gemma_norm")
_NOT_V1 = (
    *_FLAGS,
    "selector_rank",
    "selector_top_k",
    "conv_kernel_size",
    "projector_type",
    "attention_value_scale",
    "quantization_config",
)
# 1 is as good as none of these.
_OUTPUT_SCALES = ("output_multiplier", "final_logit_softcapping")
# Fields of each kind of rotary scaling: required ones, then optional ones.
_SCALING_FIELDS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
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
# What a scaling block holds besides its kind's fields.
_BESIDE_SCALING = ("type", "rope_type", "rope_theta", "partial_rotary_factor")
# Within these bounds frequencies stay finite in float32. Published thetas are 1e4 to 1e7, factors
# up to 64.
_LEAST_THETA, _MOST_THETA = 1.001, 1e15
_LEAST_SCALE, _MOST_SCALE = 1e-9, 1e9


@dataclass(frozen=True)
class Reach:
    """The committed tokens that a request's drafts read: the first `sinks`, and the last `tokens`,
    or all."""

    tokens: int | None = None
    sinks: int = 0

    @property
    def is_bounded(self) -> bool:
        return self.tokens is not None

    def of(self, length: int) -> int:
        """How many of a request's `length` tokens are read."""
        return length if self.tokens is None else min(length, self.tokens + self.sinks)

    def within(self, sliding_window: int | None) -> Reach:
        """What a layer with that sliding window reads of it."""
        if sliding_window is None or (self.tokens is not None and self.tokens < sliding_window):
            return self
        return Reach(sliding_window)


WHOLE_CONTEXT = Reach()


@dataclass(frozen=True)
class LayerAttention:
    """What one draft layer sees.

    Attributes:
        sliding_window: tokens back from the query, the query included; None for no limit.
        causal: whether a block position sees only the block positions up to itself.
        reach: of the context.
    """

    sliding_window: int | None
    causal: bool
    reach: Reach = WHOLE_CONTEXT


@dataclass(frozen=True)
class LayerGroup:
    """Draft layers that read the same of a request, and share a draft KV cache.

    Attributes:
        reach: of their context.
        numbers: of the layers in the draft, from 0, ascending.
        layers: how each of them attends.
    """

    reach: Reach
    numbers: tuple[int, ...]
    layers: tuple[LayerAttention, ...]

    def kv_shape(self, of_draft: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
        """Their K/V of one token, of a draft's `(layers, 2, kv heads, head dim)`."""
        return (len(self.numbers), *of_draft[1:])


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding: base `theta` and the checkpoint's scaling fields (empty for none)."""

    theta: float
    scaling: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class DraftConfig:
    """Geometry of a DFlash v1 draft checkpoint, in the field names of its config.json."""

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
        return cls.from_dict(read_json_object(Path(folder) / "config.json", "draft checkpoint"))

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> DraftConfig:
        """Build from a parsed config.json. See `from_pretrained` for the errors."""
        text = Fields.of(raw, "draft")
        either = draft_fields(raw)
        check_other_fields(raw)
        _refuse_other_heads(text, either)
        _check_kind(raw, either)
        depth, _, kv_heads, head_dim = draft_kv_shape(text)
        num_target_layers = either.positive_int("num_target_layers")
        config = cls(
            hidden_size=text.positive_int("hidden_size", most=_MOST_WIDTH),
            intermediate_size=text.positive_int("intermediate_size", most=_MOST_WIDTH),
            num_hidden_layers=depth,
            num_attention_heads=text.positive_int("num_attention_heads", most=_MOST_WIDTH),
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            vocab_size=text.positive_int("vocab_size"),
            rms_norm_eps=float(
                text.positive_number("rms_norm_eps", default=1e-6, least=1e-20, most=_MOST_EPS)
            ),
            rope=_rope(text),
            max_position_embeddings=text.positive_int("max_position_embeddings", default=32768),
            block_size=either.positive_int("block_size", default=16),
            mask_token_id=_mask_token_id(either),
            num_target_layers=num_target_layers,
            target_layer_ids=_target_layer_ids(either, num_target_layers, depth),
            layers=_layer_attention(text, depth),
            attention_bias=text.flag("attention_bias", default=False),
        )
        config._check_consistent()
        return config

    @property
    def target_hidden_width(self) -> int:
        """Width of one token's target hidden states: those of `target_layer_ids`, side by side."""
        return len(self.target_layer_ids) * self.hidden_size

    def groups(self, reach: Reach) -> tuple[LayerGroup, ...]:
        """The layers by what they read on a server that lets drafts read `reach`, the group of the
        first layer first. Of two groups, one reads all that the other reads."""
        numbers: dict[Reach, list[int]] = {}
        for number, layer in enumerate(self.layers):
            numbers.setdefault(reach.within(layer.sliding_window), []).append(number)
        return tuple(
            LayerGroup(of, tuple(some), tuple(replace(self.layers[i], reach=of) for i in some))
            for of, some in numbers.items()
        )

    @property
    def kv_shape(self) -> tuple[int, int, int, int]:
        """Draft K/V of one token: `(layers, 2, kv heads, head dim)`."""
        return (self.num_hidden_layers, 2, self.num_key_value_heads, self.head_dim)

    def check_target(
        self, *, hidden_size: int, vocab_size: int, num_layers: int, pair: str = ""
    ) -> None:
        """Raise ConfigError, which names the `pair`, if this draft is for another geometry."""
        given = {
            "hidden_size": hidden_size,
            "vocab_size": vocab_size,
            "num_target_layers": num_layers,
        }
        for name, of_target in given.items():
            if getattr(self, name) != of_target:
                other = "this draft is for another target"
                required = f"the target's is {of_target}{pair}: {other}"
                raise ConfigError(f"{name} in {_FILE}", getattr(self, name), required)

    def _check_consistent(self) -> None:
        positions, heads = self.max_position_embeddings, self.num_attention_heads
        valid = {
            "block_size": (
                2 <= self.block_size <= positions,
                f"at least 2, the bonus token and a drafted one, and at most {positions}, the "
                "max_position_embeddings, are required",
            ),
            "head_dim": (
                self.head_dim % 2 == 0,
                "an even number is required, hidden_size / num_attention_heads by default",
            ),
            "num_key_value_heads": (
                heads % self.num_key_value_heads == 0,
                f"a divisor of num_attention_heads ({heads}) is required",
            ),
            "mask_token_id": (
                self.mask_token_id < self.vocab_size,
                f"a token of the vocabulary of {self.vocab_size} is required",
            ),
        }
        for name, (is_valid, required) in valid.items():
            if not is_valid:
                raise ConfigError(f"{name} in {_FILE}", getattr(self, name), required)


def draft_fields(raw: Mapping[str, Any]) -> Fields:
    """The fields of a draft's config.json, those of its `dflash_config` included."""
    return Fields.of(raw, "draft", sections=("text_config", "dflash_config"))


def draft_kv_shape(text: Fields) -> tuple[int, int, int, int]:
    """Draft K/V of one token, `(layers, 2, kv heads, head dim)`, of a draft with any head.

    Raises:
        ConfigError: a field is missing or invalid.
    """
    heads = text.positive_int("num_attention_heads", most=_MOST_WIDTH)
    width = text.positive_int("hidden_size", most=_MOST_WIDTH)
    return (
        text.positive_int("num_hidden_layers", most=_MOST_LAYERS),
        2,
        text.positive_int("num_key_value_heads", default=heads, most=_MOST_WIDTH),
        text.positive_int("head_dim", default=width // heads, most=_MOST_WIDTH),
    )


def default_target_layer_ids(num_target_layers: int, depth: int) -> tuple[int, ...]:
    """Spread `depth` layers evenly from the second to the third-last target layer.

    From DFlash, arXiv 2602.06036, section 5.
    """
    if depth == 1:
        return (num_target_layers // 2,)
    first, last = 1, num_target_layers - 3
    if last < first:
        required = f"too few to read {depth} target layers; target_layer_ids are required"
        raise ConfigError(f"num_target_layers in {_FILE}", num_target_layers, required)
    return tuple(round(first + i * (last - first) / (depth - 1)) for i in range(depth))


def _mask_token_id(either: Fields) -> int:
    if "mask_token_id" not in either:
        required = "missing; drafts that name their mask token by text are not served here"
        raise UnsupportedDraft(f"dflash_config.mask_token_id in {_FILE}", required=required)
    return either.token_id("mask_token_id")


def _target_layer_ids(either: Fields, num_target_layers: int, depth: int) -> tuple[int, ...]:
    if "target_layer_ids" not in either:
        return default_target_layer_ids(num_target_layers, depth)
    return either.layer_ids("target_layer_ids", num_target_layers)


def _layer_attention(text: Fields, depth: int) -> tuple[LayerAttention, ...]:
    layers = []
    for i, kind in enumerate(text.layer_types(depth) or ("full_attention",) * depth):
        if kind == "full_attention":
            layers.append(LayerAttention(None, causal=text.flag("is_causal", default=False)))
        elif kind == "sliding_attention":
            window = text.positive_int("sliding_window")
            layers.append(LayerAttention(window, causal=text.flag("is_causal", default=True)))
        else:
            required = "full_attention and sliding_attention are served"
            raise UnsupportedDraft(f"{text.path('layer_types')}[{i}] in {_FILE}", kind, required)
    return tuple(layers)


def _check_kind(raw: Mapping[str, Any], either: Fields) -> None:
    """Raise ConfigError if a config.json is clearly not that of a DFlash draft."""
    names = either.words("architectures")
    named = any("dflash" in name.casefold() for name in names)
    if not named and "dflash_config" not in raw and "num_target_layers" not in either:
        raise ConfigError(
            _FILE,
            required="neither dflash_config nor num_target_layers: no DFlash draft; the folder or "
            "name of the draft is required, not the target's",
        )


def _refuse_other_heads(text: Fields, either: Fields) -> None:
    """Raise UnsupportedDraft with a field that a DFlash v1 draft does not have."""
    for name in _FLAGS:
        either.flag(name, default=False)
    for name in ("model_type", "projector_type"):
        either.word(name)
    either.block("quantization_config")
    found = [name for name in _NOT_V1 if either.get(name)]
    found += [name for name in _OUTPUT_SCALES if either.get(name) not in (None, 0, 1)]
    if found:
        raise either.unsupported(found[0], "only drafts of DFlash v1 are served here")
    if text.word("hidden_act") not in (None, "silu"):
        raise text.unsupported("hidden_act", "silu is served")


def _rope(text: Fields) -> RopeConfig:
    """The rotary embedding. Every field of it is read or refused."""
    block = text.block("rope_scaling")
    if not block.values:
        block = text.block("rope_parameters")
    name = "rope_type" if "rope_type" in block else "type"
    kind = block.word(name) or "default"
    if kind not in _SCALING_FIELDS:
        raise block.unsupported(name, f"{', '.join(_SCALING_FIELDS)} are served")
    _refuse_other_layouts(text, block)
    places = (block, text, text.block("rope_parameters"))
    given = next((place for place in places if "rope_theta" in place), text)
    theta = given.positive_number("rope_theta", 10000.0, least=_LEAST_THETA, most=_MOST_THETA)
    scaling, original = _scaling(block, kind), "original_max_position_embeddings"
    if kind == "default":
        return RopeConfig(float(theta))
    if original in text and original in _SCALING_FIELDS[kind][1]:
        scaling[original] = _scale(text, original)
    return RopeConfig(float(theta), {**scaling, "rope_type": kind})


def _refuse_other_layouts(text: Fields, block: Fields) -> None:
    for place in (block, text):
        if place.positive_number("partial_rotary_factor", default=1, most=1) < 1:
            required = "partial rotary embeddings are not served here"
            raise place.unsupported("partial_rotary_factor", required)
    if "mrope_section" in block:
        raise block.unsupported("mrope_section", "multi-axis embeddings are not served here")
    for name in ("rope_is_neox_style", "is_neox_style"):
        if not text.flag(name, default=True):
            required = "rotary embeddings that pair adjacent dimensions are not served here"
            raise text.unsupported(name, required)


def _scale(place: Fields, name: str) -> float:
    return place.positive_number(name, least=_LEAST_SCALE, most=_MOST_SCALE)


def _scaling(block: Fields, kind: str) -> dict[str, Any]:
    """The fields of a scaling block, checked. A field that `kind` does not have is refused."""
    required, optional = _SCALING_FIELDS[kind]
    given = [name for name in block.values if name in block and name not in _BESIDE_SCALING]
    for name in given:
        if name not in (*required, *optional):
            raise block.unsupported(name, f"with rope_type {kind!r} this is not served here")
    scaling: dict[str, Any] = {
        name: block.flag(name, default=True) if name == "truncate" else _scale(block, name)
        for name in dict.fromkeys((*required, *given))
    }
    if kind == "llama3" and scaling["high_freq_factor"] <= scaling["low_freq_factor"]:
        least = scaling["low_freq_factor"]
        raise block.error("high_freq_factor", f"more than low_freq_factor ({least})")
    return scaling
