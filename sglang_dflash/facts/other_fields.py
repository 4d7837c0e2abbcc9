"""Fields of a draft's config.json that we have no use for, and SGLang or Transformers read: what
they cannot read is refused by the pre-flight, and not by a server that has loaded its target."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from sglang_dflash.facts.fields import Fields

# What Transformers' Qwen3Config takes; the draft of a GPT-OSS target names that one's.
_MODEL_TYPES = ("qwen3", "gpt_oss")
_DTYPES = ("bfloat16", "float16", "float32", "half", "float")


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return _is_int(value) or isinstance(value, float)


def _is_token(value: Any) -> bool:
    return value is None or _is_int(value)


def _are_tokens(value: Any) -> bool:
    return _is_token(value) or (isinstance(value, list) and all(map(_is_int, value)))


def _is_positive(value: Any) -> bool:
    return value is None or (_is_int(value) and value > 0)


def _names_labels(value: Any) -> bool:
    return value is None or (
        isinstance(value, Mapping) and all(str(label).isdecimal() for label in value)
    )


def _is_dtype(value: Any) -> bool:
    return value is None or (isinstance(value, str) and value in _DTYPES)


_RULES: dict[Callable[[Any], bool], tuple[str, tuple[str, ...]]] = {
    lambda value: isinstance(value, bool): (
        "true or false",
        ("attention_bias", "tie_word_embeddings", "use_cache", "use_sliding_window"),
    ),
    lambda value: isinstance(value, float): ("a fraction", ("initializer_range",)),
    _is_number: ("a number", ("attention_dropout",)),
    _is_int: ("an integer", ("max_window_layers", "num_labels")),
    _is_token: ("a token id or null", ("bos_token_id", "pad_token_id")),
    _are_tokens: ("a token id, a list of them or null", ("eos_token_id",)),
    _is_positive: (
        "a positive integer",
        ("max_sequence_length", "model_max_length", "seq_length", "sliding_window"),
    ),
    _names_labels: ("an object of numbered labels", ("id2label",)),
    _is_dtype: (f"one of {', '.join(_DTYPES)}", ("dtype", "torch_dtype")),
    lambda value: isinstance(value, Mapping): ("an object", ("auto_map",)),
    # Transformers distinguishes null from missing; we do not.
    lambda value: value is not None: (
        "a value that is not null",
        ("head_dim", "hidden_act", "max_position_embeddings", "rms_norm_eps"),
    ),
    # Of models that contain others.
    lambda value: False: (
        "a config without it",
        ("compression_config", "language_config", "llm_config", "text_config", "thinker_config",
         "use_ngram_embedding"),
    ),
}  # fmt: skip


def check_other_fields(raw: Mapping[str, Any]) -> None:
    """Check a parsed config.json.

    Raises:
        ConfigError: SGLang or Transformers cannot read a field.
        UnsupportedDraft: its model_type is not one of Qwen3's.
    """
    fields = Fields.of(raw, "draft", sections=())
    if not fields.words("architectures"):
        raise fields.error("architectures", "a list of names")
    if not fields.word("model_type"):
        raise fields.error("model_type", f"one of {', '.join(_MODEL_TYPES)}")
    if fields.word("model_type") not in _MODEL_TYPES:
        raise fields.unsupported("model_type", f"{', '.join(_MODEL_TYPES)} are served here")
    for is_valid, (required, names) in _RULES.items():
        for name in names:
            if name in raw and not is_valid(raw[name]):
                raise fields.error(name, required)
    scaling, quantization = fields.block("rope_scaling"), fields.block("quantization_config")
    if scaling.values and all(value is None for value in scaling.values.values()):
        raise scaling.error(next(iter(scaling.values)), "a value that is not null")
    if "quantization_config" in fields and not quantization.word("quant_method"):
        raise quantization.error("quant_method", "a name")
