"""Every key that the config.json of published drafts has, by the exporters that write them (z-lab,
JetSpec, Model-Optimizer, speculators, SpecForge, NeMo Automodel, Transformers), and what it does
here; and the layout that the speculators library writes (RedHat's drafts).

A key that is not in these tables is refused by name (`check_keys`): none is ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_dflash.facts.errors import ConfigError, shown
from sglang_dflash.facts.fields import Fields, is_int, read_json_object

# What Transformers' Qwen3Config takes; the draft of a GPT-OSS target names that one's.
_MODEL_TYPES = ("qwen3", "gpt_oss")
_ARCHITECTURES = (
    "DFlashDraftModel", "DFlash2DraftModel", "MiniMaxDFlash2DraftModel", "DFlashSpeculator",
    "DFlash2Speculator", "DFlashQwen3ForCausalLM", "Qwen3DFlashForCausalLM",
    "Qwen3DFlashDraftModel", "Qwen3DFlash2DraftModel",
)  # fmt: skip
_DTYPES = ("bfloat16", "float16", "float32", "half", "float")
_PROBLEMS = ("regression", "single_label_classification", "multi_label_classification")

# Values that SGLang or Transformers can read, whether or not we have a use for them, in the words
# of an error. Transformers distinguishes null from missing; we do not.
FORMS: Mapping[str, Callable[[Any], bool]] = {
    "anything": lambda value: True,
    "a config without it": lambda value: False,
    "a value that is not null": lambda value: value is not None,
    "true or false": lambda value: isinstance(value, bool),
    "true, false or null": lambda value: isinstance(value, bool | None),
    "an integer": is_int,
    "an integer or null": lambda value: value is None or is_int(value),
    "a non-empty list of integers, or null": lambda value: (
        value is None or (isinstance(value, list) and value != [] and all(map(is_int, value)))
    ),
    "a positive integer": lambda value: value is None or (is_int(value) and value > 0),
    "a number": lambda value: is_int(value) or isinstance(value, float),
    "a number or null": lambda value: is_int(value) or isinstance(value, float | None),
    "a fraction": lambda value: isinstance(value, float),
    "a token id or null": lambda value: value is None or is_int(value),
    "a token id, a list of them or null": lambda value: (
        value is None or all(map(is_int, value if isinstance(value, list) else [value]))
    ),
    "a name": lambda value: isinstance(value, str | None),
    "a text": lambda value: isinstance(value, str | None) and value != "",
    f"one of {', '.join(_DTYPES)}": lambda value: value in (None, *_DTYPES),
    f"one of {', '.join(_PROBLEMS)}": lambda value: value in (None, *_PROBLEMS),
    "an object": lambda value: isinstance(value, Mapping),
    "an object of numbered labels": lambda value: (
        value is None
        or (isinstance(value, Mapping) and all(str(label).isdecimal() for label in value))
    ),
}


@dataclass(frozen=True)
class Read:
    """A key that decides a part of `DraftConfig`, or has to agree with it."""

    form: str = "anything"


@dataclass(frozen=True)
class Idle:
    """A key without effect on a draft, and the reason."""

    reason: str
    form: str = "anything"


@dataclass(frozen=True)
class Foreign:
    """A key of drafts that SGLang's built-in worker serves, and we do not, unless its value is
    `neutral`, which is as good as none."""

    what: str
    form: str = "anything"
    neutral: tuple[Any, ...] = (None, False, 0, "")


Key = Read | Idle | Foreign


def _rows(*rows: tuple[str, Key]) -> dict[str, Key]:
    return {name: key for names, key in rows for name in names.split()}


_TARGETS = "the target's is used"
_TRAINING = "of training"
_OUTPUTS = "of what a Transformers model returns"

# Keys of DFlash itself, in `dflash_config` or beside it.
_EITHER = _rows(
    ("block_size num_target_layers", Read("a positive integer")),
    ("mask_token_id", Read("a token id or null")),
    ("target_layer_ids", Read("a non-empty list of integers, or null")),
    ("is_causal target_hidden_size", Read()),
    ("final_logit_softcapping output_multiplier", Read("a number or null")),
    ("projector_type", Foreign("a head of another kind", "a name", (None, ""))),
    ("mask_token", Idle("mask_token_id names the token", "a text")),
    ("attention_sink_bias", Foreign("learned attention sinks (MiMo)", "true, false or null")),
    ("attention_value_scale", Foreign("a scale of V (MiMo)", "a number or null", (None, 0, 1))),
    ("shift_label pure_draft_prefix_len gru_hidden_dim emb_dim", Foreign("the head of Domino")),
    ("markov_rank markov_head_type use_confidence_head enable_confidence_head "
     "confidence_head_with_markov dspark_block_size dspark_markov_rank dspark_noise_token_id",
     Foreign("the head of DSpark")),
    ("sample_from_anchor",
     Foreign("a draft from the bonus token's position (DSpark)", "true, false or null")),
    ("selector_rank selector_top_k conv_kernel_size conv_group_size", Read("an integer or null")),
    ("num_anchors max_anchors loss_decay_gamma", Idle(_TRAINING)),
)  # fmt: skip
IN_DFLASH_CONFIG: Mapping[str, Key] = _EITHER | _rows(
    ("causal causal_head use_swa", Read("true, false or null")),
    ("swa_window_size", Read()),
    ("input_embedding_scale", Foreign("a scale of the embeddings", "a number or null", (None, 1))),
    ("backbone_rotary_base", Idle(_TARGETS)),
    # SGLang reads these two here only, and no null.
    ("attention_sink_bias", Foreign("learned attention sinks (MiMo)", "true or false")),
    ("output_multiplier", Read("a number")),
)
AT_TOP: Mapping[str, Key] = _EITHER | _rows(
    ("architectures model_type dflash_config hidden_size intermediate_size num_hidden_layers "
     "num_attention_heads num_key_value_heads v_head_dim vocab_size draft_vocab_size layer_types "
     "eagle_aux_hidden_state_layer_ids rope_scaling rope_parameters "
     "original_max_position_embeddings rope_is_neox_style is_neox_style partial_rotary_factor",
     Read()),
    ("hidden_act head_dim max_position_embeddings rms_norm_eps", Read("a value that is not null")),
    ("attention_bias use_sliding_window", Read("true or false")),
    ("sliding_window", Read("a positive integer")),
    ("max_window_layers", Read("an integer")),
    ("rope_theta", Read("a number or null")),
    ("has_embed_tokens", Foreign("an embedding of its own", "true, false or null")),
    ("has_lm_head",
     Foreign("an lm_head of its own, but by draft_vocab_size", "true, false or null")),
    ("use_gemma_norm", Foreign("RMSNorm by 1 + weight", "true, false or null")),
    ("swiglu_alpha swiglu_limit", Foreign("a clamped SwiGLU (MiniMax)")),
    ("add_swa_attention_sink_bias",
     Foreign("learned attention sinks (MiMo)", "true, false or null")),
    ("gating", Foreign("output gates (Laguna)", neutral=(None, False, "", "disabled"))),
    ("logit_scale", Foreign("a scale of the logits", "a number or null", (None, 1))),
    ("quantization_config", Foreign("a quantized draft", neutral=(None,))),
    ("compression_config language_config llm_config text_config thinker_config "
     "use_ngram_embedding", Idle("of models that contain others", "a config without it")),
    ("auto_map", Idle("code of a draft is never run", "an object")),
    ("bos_token_id pad_token_id", Idle(_TARGETS, "a token id or null")),
    ("eos_token_id", Idle(_TARGETS, "a token id, a list of them or null")),
    ("tie_word_embeddings", Idle("lm_head and embedding are the target's", "true or false")),
    ("dtype torch_dtype", Idle("the server's dtype is used", f"one of {', '.join(_DTYPES)}")),
    ("max_sequence_length model_max_length seq_length",
     Idle("max_position_embeddings is read", "a positive integer")),
    ("transformers_version _name_or_path", Idle("of the exporter")),
    ("mlp_bias", Foreign("biases of the MLP", "true, false or null")),
    ("flex_attention_backend", Idle(_TRAINING)),
    ("pretraining_tp", Idle(_TRAINING, "an integer")),
    ("initializer_range", Idle(_TRAINING, "a fraction")),
    ("attention_dropout", Idle(_TRAINING, "a number")),
    ("use_cache", Idle(_OUTPUTS, "true or false")),
    ("is_encoder_decoder", Idle(_OUTPUTS, "true or false")),
    ("output_attentions output_hidden_states return_dict", Idle(_OUTPUTS, "true, false or null")),
    ("num_labels chunk_size_feed_forward", Idle(_OUTPUTS, "an integer")),
    ("problem_type", Idle(_OUTPUTS, f"one of {', '.join(_PROBLEMS)}")),
    ("id2label", Idle(_OUTPUTS, "an object of numbered labels")),
    ("label2id", Idle(_OUTPUTS)),
    ("torchscript pruned_heads use_bfloat16 tf_legacy_loss is_decoder add_cross_attention "
     "cross_attention_hidden_size tie_encoder_decoder finetuning_task prefix sep_token_id "
     "decoder_start_token_id task_specific_params tokenizer_class", Idle("of older Transformers")),
    ("max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty "
     "temperature top_k top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size "
     "encoder_no_repeat_ngram_size bad_words_ids num_return_sequences output_scores "
     "return_dict_in_generate forced_bos_token_id forced_eos_token_id remove_invalid_values "
     "exponential_decay_length_penalty suppress_tokens begin_suppress_tokens",
     Idle("requests tell how to sample")),
)  # fmt: skip


def check_keys(raw: Mapping[str, Any]) -> None:
    """Check the keys of a parsed config.json, and of its `dflash_config`, with the form of those
    values that `DraftConfig` does not read.

    Raises:
        ConfigError: SGLang or Transformers cannot read a value.
        UnsupportedDraft: a key that only drafts of another kind have, or one that is unknown.
    """
    top = Fields.of(raw, "draft", section=None)
    own = top.block("dflash_config")
    _check_form(top)
    present = [
        (place, name, known.get(name))
        for place, known in ((top, AT_TOP), (own, IN_DFLASH_CONFIG))
        for name in place.values
    ]
    for name in own.values:
        if name in own and top.get(name, own.get(name)) != own.get(name):
            raise own.error(name, f"{shown(top.get(name))}, as beside dflash_config,")
    for place, name, key in present:
        if key is not None and not FORMS[key.form](place.values[name]):
            raise place.error(name, key.form)
    _check_kind(top)
    for place, name, key in present:
        if key is None and name in place:
            raise place.unsupported(name, "sglang-dflash does not know this key of a draft")
        if isinstance(key, Foreign) and place.get(name) not in key.neutral:
            raise place.unsupported(name, f"not served here: {key.what}")


def _check_form(top: Fields) -> None:
    """Raise ConfigError for what SGLang or Transformers cannot read, whatever the draft is."""
    if not top.words("architectures"):
        raise top.error("architectures", "a list of names")
    if not top.word("model_type"):
        raise top.error("model_type", f"one of {', '.join(_MODEL_TYPES)}")
    scaling, quantization = top.block("rope_scaling"), top.block("quantization_config")
    if scaling.values and all(value is None for value in scaling.values.values()):
        raise scaling.error(next(iter(scaling.values)), "a value that is not null")
    if "quantization_config" in top and not quantization.word("quant_method"):
        raise quantization.error("quant_method", "a name")


def _check_kind(top: Fields) -> None:
    """Raise UnsupportedDraft unless it is a network that `drafting.model` has, and ConfigError if
    it is clearly not that of a DFlash draft."""
    names = top.words("architectures")
    named = any("dflash" in name.casefold() for name in names)
    if not named and "dflash_config" not in top and "num_target_layers" not in top:
        raise ConfigError(
            top.file,
            required="neither dflash_config nor num_target_layers: no DFlash draft; the folder or "
            "name of the draft is required, not the target's",
        )
    for name, served in (("architectures", _ARCHITECTURES), ("model_type", _MODEL_TYPES)):
        given = names if name == "architectures" else (top.word(name),)
        if not set(given) & set(served):
            raise top.unsupported(name, f"{', '.join(served)} are served here")
    if top.word("hidden_act") not in (None, "silu"):
        raise top.unsupported("hidden_act", "silu is served")


# -- the layout of speculators ---------------------------------------------------------------------

_KIND, _NETWORK = "speculators_model_type", "transformer_layer_config"
_LAYERS, _NON_CAUSAL = "aux_hidden_state_layer_ids", "sliding_window_non_causal"


def flat(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """A parsed config.json in z-lab's layout, which is returned as it is.

    Raises:
        ConfigError: a field of the other layout is invalid, or it is a draft of another method.
    """
    if not isinstance(raw.get(_KIND), str):
        return raw
    top = Fields.of(raw, "draft", section=None)
    if raw[_KIND] not in ("dflash", "dflash2"):
        raise top.error(_KIND, "dflash or dflash2, for SGLang reads no draft of that library,")
    network, ids = top.block(_NETWORK).values, raw.get(_LAYERS)
    if not isinstance(ids, list) or not ids or not all(type(i) is int and i > 0 for i in ids):
        # 0 is the embedding, which no layer gives.
        raise top.error(_LAYERS, "a non-empty list of positive integers")
    # The last two are of the library itself, and of how it was trained and is to be served.
    consumed = (
        _KIND, _NETWORK, _LAYERS, _NON_CAUSAL, "model_type", "speculators_config",
        "speculators_version",
    )  # fmt: skip
    beside = {name: raw[name] for name in raw if name in top and name not in consumed}
    for name in beside:
        other = network.get(name, beside[name])
        if other not in (None, beside[name]) and isinstance(AT_TOP.get(name), Read):
            raise top.error(name, f"{shown(other)}, as in {_NETWORK},")
    if network.get("model_type") == "llama":
        # Some of RedHat's drafts say so, and have Qwen3's layers all the same.
        beside["model_type"] = "qwen3"
    # Layer i of the target has the id i + 1 there, as in `hidden_states` of Transformers.
    beside["target_layer_ids"] = [i - 1 for i in ids]
    if top.flag(_NON_CAUSAL, default=False):
        # Full layers are bidirectional in any case.
        beside["is_causal"] = False
    return {**network, **beside}


def is_draft(folder: str | Path) -> bool:
    """Whether the folder's config.json names a draft."""
    try:
        names = read_json_object(Path(folder) / "config.json", "checkpoint").get("architectures")
    except ConfigError:
        return False
    return isinstance(names, list) and any(name in _ARCHITECTURES for name in names)
