"""The config.json of a draft checkpoint as one validated value, `DraftConfig`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sglang_dflash.checkpoint.draft_keys import check_code, check_keys, flat, unknown_keys
from sglang_dflash.checkpoint.draft_rope import RopeConfig, read_rope
from sglang_dflash.checkpoint.fields import MOST_WIDTH, Fields, read_json_object
from sglang_dflash.checkpoint.heads import read_head
from sglang_dflash.checkpoint.heads.head import PLAIN_HEAD, HeadConfig
from sglang_dflash.checkpoint.quantization import Quantization, read_quantization, with_quantization
from sglang_dflash.checkpoint.target_config import kv_heads_of_rank, share_of_rank
from sglang_dflash.checkpoint.target_layers import read_target_layer_ids
from sglang_dflash.common.errors import ConfigError, UnsupportedDraft

_FILE = "the draft's config.json"


@dataclass(frozen=True)
class Reach:
    """The committed tokens that a request's drafts read: the first `sinks`, and the last `tokens`,
    or all.

    Whoever counts, chooses, sends or keeps these tokens asks `tail`, itself or through `parts`.
    Only the kernels `context_table` and `block_attention` compute the edge of a window themselves.
    """

    tokens: int | None = None
    sinks: int = 0

    @property
    def is_bounded(self) -> bool:
        return self.tokens is not None

    def tail(self, length: Any) -> Any:
        """Return the position at which the last `tokens` of a request of `length` tokens begin, an
        int, or a tensor of them; below 0 if it has fewer. Of a bounded reach only."""
        if self.tokens is None:
            raise ValueError("tokens: None; a reach without a window has no tail")
        return length - self.tokens

    def parts(self, count: int, page_size: int = 1) -> tuple[slice, slice]:
        """Return which of a request's `count` pages hold tokens that are read: the first ones and
        the last ones. The last page may hold a single token. By default a page is a token."""
        if self.tokens is None:
            return slice(0, 0), slice(0, count)
        sinks = min(-(-self.sinks // page_size), count)
        first = self.tail((count - 1) * page_size + 1) // page_size
        return slice(0, sinks), slice(max(first, sinks), count)

    def tokens_read(self, length: int) -> int:
        """Return how many of a request's `length` tokens are read."""
        return sum(part.stop - part.start for part in self.parts(length))

    def resized(self, room: int) -> Reach:
        """Return a reach of `room` tokens in all, sinks before others."""
        sinks = min(self.sinks, room)
        return Reach(room - sinks, sinks)

    def within(self, sliding_window: int | None) -> Reach:
        """Return the part of this reach that a layer with that sliding window reads."""
        if sliding_window is None or (self.tokens is not None and self.tokens < sliding_window):
            return self
        return Reach(sliding_window)


WHOLE_CONTEXT = Reach()


@dataclass(frozen=True)
class LayerAttention:
    """The context and block positions that one draft layer sees.

    Attributes:
        sliding_window: tokens back from the query, the query included; None for no limit.
        causal: whether a block position sees only the block positions up to itself.
        reach: context tokens that it sees.
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
        attentions: how each of them attends.
    """

    reach: Reach
    numbers: tuple[int, ...]
    attentions: tuple[LayerAttention, ...]

    def kv_shape(self, of_draft: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
        """Their K/V of one token, of a draft's `(layers, 2, kv heads, head dim)`."""
        return (len(self.numbers), *of_draft[1:])


@dataclass(frozen=True)
class DraftConfig:
    """The config of a draft checkpoint, in the field names of its config.json.

    Attributes:
        num_target_layers: None if the checkpoint does not tell.
        names_target_layers: whether the checkpoint names `target_layer_ids`. If not, they are
            `default_target_layer_ids`, as in DFlash's own code; the draft may have been trained
            with others.
        layers: how each layer attends.
        draft_vocab_size: rows of the draft's own lm_head, for a part of the vocabulary; None if it
            uses the target's.
        output_multiplier, final_logit_softcapping: of the draft's logits, applied in this order;
            None for no cap. They do not change which token has the largest logit.
        head: what it has beyond a draft of v1.
        quantization: how its weights are stored; None if they are plain.
        unknown_keys: keys of its config.json that have no effect here.
    """

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
    num_target_layers: int | None
    target_layer_ids: tuple[int, ...]
    layers: tuple[LayerAttention, ...]
    names_target_layers: bool = True
    attention_bias: bool = False
    draft_vocab_size: int | None = None
    output_multiplier: float = 1.0
    final_logit_softcapping: float | None = None
    head: HeadConfig = PLAIN_HEAD
    quantization: Quantization | None = None
    unknown_keys: tuple[str, ...] = field(default=(), compare=False)

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> DraftConfig:
        """Read `folder/config.json`, and what ModelOpt writes beside it.

        Raises:
            ConfigError: the folder or file is missing, is not JSON, or holds an invalid field.
            UnsupportedDraft: the checkpoint needs a drafter head that is not implemented here.
        """
        return cls.from_dict(read_draft(folder))

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> DraftConfig:
        """Build from a parsed config.json. See `from_pretrained` for the errors."""
        check_code(raw)
        flat_config = flat(raw)
        try:
            return cls._from_flat(flat_config)
        except UnsupportedDraft as other:
            if flat_config is raw:
                raise
            # SGLang's worker does not read that layout.
            raise ConfigError(other.field, other.value, other.required) from None

    @classmethod
    def _from_flat(cls, raw: Mapping[str, Any]) -> DraftConfig:
        check_keys(raw)
        fields = draft_fields(raw)
        depth, _, kv_heads, head_dim = draft_kv_shape(fields)
        targets = "num_target_layers"
        num_target_layers = fields.positive_int(targets) if targets in fields else None
        config = cls(
            hidden_size=fields.positive_int("hidden_size", most=MOST_WIDTH),
            intermediate_size=fields.positive_int("intermediate_size", most=MOST_WIDTH),
            num_hidden_layers=depth,
            num_attention_heads=fields.positive_int("num_attention_heads", most=MOST_WIDTH),
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            vocab_size=fields.positive_int("vocab_size"),
            # Published drafts have 1e-6 and 1e-5.
            rms_norm_eps=fields.positive_number("rms_norm_eps", 1e-6, least=1e-20, most=0.1),
            rope=read_rope(fields),
            max_position_embeddings=fields.positive_int("max_position_embeddings", default=32768),
            block_size=fields.positive_int("block_size", default=16),
            mask_token_id=_mask_token_id(fields),
            num_target_layers=num_target_layers,
            target_layer_ids=read_target_layer_ids(fields, num_target_layers, depth),
            layers=_layer_attention(fields, depth),
            names_target_layers="target_layer_ids" in fields,
            attention_bias=fields.flag("attention_bias", default=False),
            draft_vocab_size=_draft_vocab_size(fields),
            output_multiplier=fields.positive_number("output_multiplier", default=1),
            final_logit_softcapping=_softcap(fields),
            head=read_head(fields),
            quantization=read_quantization(fields),
            unknown_keys=unknown_keys(raw),
        )
        config._check_consistent()
        config._check_repeated(fields)
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
            LayerGroup(
                group_reach,
                tuple(members),
                tuple(replace(self.layers[i], reach=group_reach) for i in members),
            )
            for group_reach, members in numbers.items()
        )

    def of_rank(self, ranks: int) -> DraftConfig:
        """A rank's part. Raises ConfigError if the ranks do not divide it."""
        heads = share_of_rank("draft's num_attention_heads", self.num_attention_heads, ranks)
        kv_heads = kv_heads_of_rank("draft", self.num_key_value_heads, ranks)
        inner = share_of_rank("draft's intermediate_size", self.intermediate_size, ranks)
        return replace(
            self, num_attention_heads=heads, num_key_value_heads=kv_heads, intermediate_size=inner
        )

    @property
    def kv_shape(self) -> tuple[int, int, int, int]:
        """Draft K/V of one token: `(layers, 2, kv heads, head dim)`."""
        return (self.num_hidden_layers, 2, self.num_key_value_heads, self.head_dim)

    def check_target(
        self, *, hidden_size: int, vocab_size: int, num_layers: int, pair: str = ""
    ) -> None:
        """Raise ConfigError, which names the `pair`, if this draft is for another geometry."""
        target_values = {"hidden_size": hidden_size, "vocab_size": vocab_size}
        if self.num_target_layers is not None:
            target_values["num_target_layers"] = num_layers
        for name, of_target in target_values.items():
            if getattr(self, name) != of_target:
                other = "this draft is for another target"
                required = f"the target's is {of_target}{pair}: {other}"
                raise ConfigError(f"{name} in {_FILE}", getattr(self, name), required)
        if self.target_layer_ids[-1] >= num_layers:
            required = f"ids below {num_layers}, the layers of this target, are required"
            raise ConfigError(f"target_layer_ids in {_FILE}", list(self.target_layer_ids), required)

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
            "draft_vocab_size": (
                (self.draft_vocab_size or 0) <= self.vocab_size,
                f"at most {self.vocab_size}, the vocab_size, is required",
            ),
        }
        for name, (is_valid, required) in valid.items():
            if not is_valid:
                raise ConfigError(f"{name} in {_FILE}", getattr(self, name), required)
        for name, value, required in self.head.problems(self):
            raise ConfigError(f"{name} in {_FILE}", value, required)

    def _check_repeated(self, fields: Fields) -> None:
        """Raise UnsupportedDraft if a field that follows from others does not."""
        follows = {
            "v_head_dim": self.head_dim,
            "target_hidden_size": self.hidden_size,
            "eagle_aux_hidden_state_layer_ids": [i + 1 for i in self.target_layer_ids],
        }
        for name, value in follows.items():
            if name in fields and fields.get(name) != value:
                raise fields.unsupported(name, f"with the other fields, {value} is served here")


def read_draft(folder: str | Path) -> Mapping[str, Any]:
    """The config.json of a draft, with what ModelOpt writes beside it. Raises ConfigError."""
    raw = read_json_object(Path(folder) / "config.json", "draft checkpoint")
    return with_quantization(raw, folder)


def draft_fields(raw: Mapping[str, Any]) -> Fields:
    """The fields of a draft's config.json, those of its `dflash_config` included."""
    return Fields.of(flat(raw), "draft", section="dflash_config")


def draft_kv_shape(fields: Fields) -> tuple[int, int, int, int]:
    """Draft K/V of one token, `(layers, 2, kv heads, head dim)`, of a draft with any head.

    Raises:
        ConfigError: a field is missing or invalid.
    """
    heads = fields.positive_int("num_attention_heads", most=MOST_WIDTH)
    width = fields.positive_int("hidden_size", most=MOST_WIDTH)
    return (
        fields.positive_int("num_hidden_layers", most=256),
        2,
        fields.positive_int("num_key_value_heads", default=heads, most=MOST_WIDTH),
        fields.positive_int("head_dim", default=width // heads, most=MOST_WIDTH),
    )


def _mask_token_id(fields: Fields) -> int:
    if "mask_token_id" not in fields:
        required = "missing; drafts that name their mask token by text are not served here"
        raise UnsupportedDraft(f"dflash_config.mask_token_id in {_FILE}", required=required)
    return fields.token_id("mask_token_id")


def _draft_vocab_size(fields: Fields) -> int | None:
    if fields.get("draft_vocab_size") in (None, fields.get("vocab_size")):
        return None
    return fields.positive_int("draft_vocab_size")


def _softcap(fields: Fields) -> float | None:
    name = "final_logit_softcapping"
    return None if fields.get(name) in (None, 0) else fields.positive_number(name)


def _layer_attention(fields: Fields, depth: int) -> tuple[LayerAttention, ...]:
    """Return the attention of each layer. `use_swa` makes all layers slide if none does by
    `layer_types`, without being causal (as vLLM's `_resolve_layer_attention`)."""
    kinds, causal = _layer_kinds(fields, depth), _causality(fields)
    slides = "sliding_attention" in kinds
    swa = fields.flag("use_swa", default=False) and not slides
    if slides and not fields.flag("use_sliding_window", default=True):
        raise fields.error("use_sliding_window", "with sliding layers in layer_types, true")
    if "swa_window_size" in fields and not (slides or swa):
        raise fields.unsupported("swa_window_size", "no layer slides, and use_swa is not true")
    layers = []
    for i, layer_type in enumerate(kinds):
        if layer_type not in ("full_attention", "sliding_attention"):
            required = "full_attention and sliding_attention are served"
            raise UnsupportedDraft(
                f"{fields.path('layer_types')}[{i}] in {_FILE}", layer_type, required
            )
        window = _sliding_window(fields) if swa or layer_type == "sliding_attention" else None
        by_default = layer_type == "sliding_attention"
        layers.append(LayerAttention(window, by_default if causal is None else causal))
    return tuple(layers)


def _layer_kinds(fields: Fields, depth: int) -> tuple[str, ...]:
    """`layer_types`, or what Transformers' Qwen3Config makes of its other fields."""
    kinds = fields.layer_types(depth)
    if kinds is not None:
        return kinds
    first = depth
    if fields.flag("use_sliding_window", default=False):
        first = min(max(fields.integer("max_window_layers", default=28), 0), depth)
    return ("full_attention",) * first + ("sliding_attention",) * (depth - first)


def _sliding_window(fields: Fields) -> int:
    names = [name for name in ("swa_window_size", "sliding_window") if name in fields]
    windows = {fields.positive_int(name) for name in names or ["sliding_window"]}
    if len(windows) > 1:
        raise fields.error(names[0], f"{fields.get(names[1])}, the sliding_window,")
    return windows.pop()


def _causality(fields: Fields) -> bool | None:
    """Return whether block positions of all layers see only the ones before them; None if the type
    of the layer decides."""
    names = [name for name in ("is_causal", "causal", "causal_head") if name in fields]
    flags = [fields.flag(name, default=False) for name in names]
    if len(set(flags)) > 1:
        raise fields.error(names[-1], f"{flags[0]}, as {fields.path(names[0])} says,")
    return flags[0] if flags else None
