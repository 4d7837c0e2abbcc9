"""The layout of config.json that the speculators library writes (RedHat's drafts)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang_dflash.facts.draft_keys import AT_TOP, Read
from sglang_dflash.facts.errors import shown
from sglang_dflash.facts.fields import Fields

_KIND, _NETWORK = "speculators_model_type", "transformer_layer_config"
_LAYERS, _NON_CAUSAL = "aux_hidden_state_layer_ids", "sliding_window_non_causal"
# Of the library itself, and of how it was trained and is to be served.
_IDLE = ("speculators_config", "speculators_version")


def flat(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """A parsed config.json in z-lab's layout, which is returned as it is.

    Raises:
        ConfigError: a field of the other layout is invalid, or it is a draft of another method.
    """
    if not isinstance(raw.get(_KIND), str):
        return raw
    top = Fields.of(raw, "draft", sections=())
    if raw[_KIND] not in ("dflash", "dflash2"):
        raise top.error(_KIND, "dflash or dflash2, for SGLang reads no draft of that library,")
    network, ids = top.block(_NETWORK).values, raw.get(_LAYERS)
    if not isinstance(ids, list) or not ids or not all(type(i) is int and i > 0 for i in ids):
        # 0 is the embedding, which no layer gives.
        raise top.error(_LAYERS, "a non-empty list of positive integers")
    consumed = (_KIND, _NETWORK, _LAYERS, _NON_CAUSAL, "model_type", *_IDLE)
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
