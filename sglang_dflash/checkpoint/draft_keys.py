"""The keys of a draft's config.json that mean something here: those that are read, and those of
drafts that our worker does not serve; and the layout that the speculators library writes (RedHat's
drafts).

Another key in `dflash_config` is named in a warning (`unknown_keys`): one that changes the network
costs acceptance, which the server reports, and never outputs. Beside `dflash_config` stand keys of
Transformers, too, which are SGLang's to read. What SGLang or Transformers cannot read of a config,
a server's start tells (`serving.start.draft_files`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sglang_dflash.checkpoint.fields import NEUTRAL, Fields, read_json_object
from sglang_dflash.checkpoint.heads import architectures, head_keys, speculators_types
from sglang_dflash.common.errors import ConfigError, shown

# Values of `model_type` that are served: the draft of a GPT-OSS target names the target's.
_MODEL_TYPES = ("qwen3", "gpt_oss")


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Keys that decide a part of `DraftConfig`, or have to agree with it, at the top or in
# `dflash_config`; but for those of a head.
_READ = _names(
    """
    architectures attention_bias block_size causal causal_head compression_config dflash_config
    draft_vocab_size eagle_aux_hidden_state_layer_ids final_logit_softcapping head_dim hidden_act
    hidden_size intermediate_size is_causal is_neox_style layer_types mask_token_id
    max_position_embeddings max_window_layers model_type num_attention_heads num_hidden_layers
    num_key_value_heads num_target_layers original_max_position_embeddings output_multiplier
    partial_rotary_factor quantization_config rms_norm_eps rope_is_neox_style rope_parameters
    rope_scaling rope_theta sliding_window swa_window_size target_hidden_size target_layer_ids
    use_sliding_window use_swa v_head_dim vocab_size
    """
)
# Keys of training, which published drafts have in `dflash_config`.
TRAINING = _names("backbone_rotary_base loss_decay_gamma mask_token num_anchors")
# Keys of drafts that SGLang's built-in worker serves, and ours does not -> what they are.
FOREIGN: Mapping[str, str] = {
    name: feature
    for feature, names in {
        "a head of another kind": "projector_type",
        "the head of Domino": "shift_label pure_draft_prefix_len gru_hidden_dim emb_dim",
        "the head of DSpark": "markov_rank markov_head_type use_confidence_head "
        "enable_confidence_head confidence_head_with_markov dspark_block_size "
        "dspark_markov_rank dspark_noise_token_id",
        "a draft from the bonus token's position (DSpark)": "sample_from_anchor",
        "learned attention sinks (MiMo)": "attention_sink_bias add_swa_attention_sink_bias",
        "a scale of V (MiMo)": "attention_value_scale",
        "output gates (Laguna)": "gating",
        "a clamped SwiGLU (MiniMax)": "swiglu_alpha swiglu_limit",
        "an embedding of its own": "has_embed_tokens",
        "an lm_head of its own, but by draft_vocab_size": "has_lm_head",
        "RMSNorm by 1 + weight": "use_gemma_norm",
        "biases of the MLP": "mlp_bias",
        "a scale of the embeddings": "input_embedding_scale",
        "a scale of the logits": "logit_scale",
    }.items()
    for name in names.split()
}
# Values of scales and gates that are as good as none, too.
_ALSO_NEUTRAL = dict.fromkeys(("attention_value_scale", "input_embedding_scale"), 1) | {
    "logit_scale": 1,
    "gating": "disabled",
}


def read_keys() -> frozenset[str]:
    """The keys that are read, those of heads included."""
    return _READ | head_keys()


def check_code(raw: Mapping[str, Any]) -> None:
    """Raise ConfigError if an `auto_map` of a parsed config.json names Python for a config,
    tokenizer or processor: a draft's code is never run. Published drafts name a model only."""
    for name, code in (entry for auto_map in auto_maps(raw) for entry in auto_map.items()):
        if name.startswith("Auto") and not name.startswith("AutoModel"):
            field = f"auto_map.{name} in the draft's config.json"
            raise ConfigError(field, code, "code of a draft is never run: remove the entry")


def auto_maps(raw: Any) -> Iterator[Mapping[str, Any]]:
    """The `auto_map` entries of a parsed config.json that are not empty, at any depth: SGLang lifts
    the fields of a nested config."""
    if not isinstance(raw, Mapping):
        return
    auto_map = raw.get("auto_map")
    if isinstance(auto_map, Mapping) and auto_map:
        yield auto_map
    for value in raw.values():
        yield from auto_maps(value)


def check_keys(raw: Mapping[str, Any]) -> None:
    """Check the keys of a parsed config.json, and of its `dflash_config`.

    Raises:
        ConfigError: it is no DFlash draft, or the two places contradict each other.
        UnsupportedDraft: it is a draft of a kind that is not implemented here.
    """
    top = Fields.of(raw, "draft", section=None)
    nested = top.block("dflash_config")
    for name in nested.values:
        if name in nested and top.get(name, nested.get(name)) != nested.get(name):
            raise nested.error(name, f"{shown(top.get(name))}, as beside dflash_config,")
    _check_kind(top)
    for place in (top, nested):
        for name in place.values:
            feature, value = FOREIGN.get(name), place.get(name)
            if feature and value not in NEUTRAL and value != _ALSO_NEUTRAL.get(name):
                raise place.unsupported(name, f"not served here: {feature}")


def unknown_keys(raw: Mapping[str, Any]) -> tuple[str, ...]:
    """The dotted paths of keys in `dflash_config` that have a value and mean nothing here."""
    nested = Fields.of(raw, "draft", section=None).block("dflash_config")
    recognized = read_keys() | TRAINING | FOREIGN.keys()
    return tuple(
        nested.path(name) for name in nested.values if name in nested and name not in recognized
    )


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
    if not names:
        raise top.error("architectures", "a list of names")
    model_type = top.word("model_type")
    if not model_type:
        raise top.error("model_type", f"one of {', '.join(_MODEL_TYPES)}")
    for name, declared, served in (
        ("architectures", names, architectures()), ("model_type", (model_type,), _MODEL_TYPES),
    ):  # fmt: skip
        if not set(declared) & set(served):
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
    if raw[_KIND] not in speculators_types():
        served = " or ".join(speculators_types())
        raise top.error(_KIND, f"{served}, for SGLang reads no draft of that library,")
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
    read = read_keys()
    for name in beside:
        other = network.get(name, beside[name])
        if other not in (None, beside[name]) and name in read:
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
    """Return whether the folder's config.json names a draft."""
    try:
        names = read_json_object(Path(folder) / "config.json", "checkpoint").get("architectures")
    except ConfigError:
        return False
    return isinstance(names, list) and any(name in architectures() for name in names)
