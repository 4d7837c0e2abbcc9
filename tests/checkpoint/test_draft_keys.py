"""No key of a draft's `dflash_config` is ignored silently: each is read, is of training, is of a
draft that we do not serve, or is named in a warning."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from sglang_dflash.checkpoint.draft_config import DraftConfig, LayerAttention
from sglang_dflash.checkpoint.draft_keys import FOREIGN, TRAINING, read_keys
from sglang_dflash.checkpoint.draft_rope import RopeConfig
from sglang_dflash.checkpoint.heads.dflash2 import Convolution, DFlash2Config, Selector
from sglang_dflash.checkpoint.quantization import FORMATS, NAMES, Declared, Quantization, Stored
from sglang_dflash.checkpoint.tensors import expected_tensors
from sglang_dflash.common.errors import ConfigError, UnsupportedDraft, cut
from sglang_dflash.drafting.options import Options
from tests.checkpoint.test_fuzz import bounded, values
from tests.conftest import raw_config
from tests.errors import refused
from tests.speculators import layout

BASE = DraftConfig.from_dict(raw_config())


def config_with(*changes: tuple[str, Any]) -> DraftConfig:
    raw = raw_config()
    raw["dflash_config"] = dict(raw["dflash_config"])
    for path, value in changes:
        section, _, name = path.rpartition(".")
        (raw[section] if section else raw)[name] = value
    return DraftConfig.from_dict(raw)


SLIDING, FULL = ["sliding_attention"] * 3, ["full_attention"] * 3
CAUSAL = {"layers": (LayerAttention(None, True),) * 3}
WINDOWED = {"layers": (LayerAttention(8, False),) * 3}
SWA = ("dflash_config.use_swa", True)
FP8 = Quantization((Stored(FORMATS[1], Declared("fp8", "per tensor", 8)),))
YARN = {"rope_type": "yarn", "factor": 4}
SELECTING = DFlash2Config(selector=Selector(8, 4))
CONVOLVED = DFlash2Config(convolution=Convolution(2, 8))
# A key that is read -> what it is given, what beside it, and what of the config then differs; or
# the error that it leads to.
EXAMPLES: dict[str, tuple[Any, list[tuple[str, Any]], dict[str, Any] | type[ConfigError]]] = {
    "architectures": (["DFlashSomethingElse"], [], UnsupportedDraft),
    "model_type": ("laguna", [], UnsupportedDraft),
    "dflash_config": ([1], [], ConfigError),
    "hidden_act": ("gelu", [], UnsupportedDraft),
    "hidden_size": (64, [], {"hidden_size": 64}),
    "intermediate_size": (96, [], {"intermediate_size": 96}),
    "num_hidden_layers": (2, [], {"num_hidden_layers": 2, "layers": BASE.layers[:2]}),
    "num_attention_heads": (2, [], {"num_attention_heads": 2}),
    "num_key_value_heads": (4, [], {"num_key_value_heads": 4}),
    "vocab_size": (128, [], {"vocab_size": 128}),
    "head_dim": (8, [], {"head_dim": 8}),
    "v_head_dim": (8, [], UnsupportedDraft),
    "max_position_embeddings": (99, [], {"max_position_embeddings": 99}),
    "rms_norm_eps": (1e-5, [], {"rms_norm_eps": 1e-5}),
    "attention_bias": (True, [], {"attention_bias": True}),
    "rope_theta": (1e6, [], {"rope": RopeConfig(1e6)}),
    "rope_scaling": (YARN, [], {"rope": RopeConfig(1e4, YARN)}),
    "rope_parameters": (YARN, [], {"rope": RopeConfig(1e4, YARN)}),
    "original_max_position_embeddings": (
        9, [("rope_scaling", YARN)],
        {"rope": RopeConfig(1e4, {**YARN, "original_max_position_embeddings": 9})},
    ),
    "rope_is_neox_style": (False, [], UnsupportedDraft),
    "is_neox_style": (False, [], UnsupportedDraft),
    "partial_rotary_factor": (0.5, [], UnsupportedDraft),
    "layer_types": (
        ["sliding_attention", *FULL[1:]], [("sliding_window", 8)],
        {"layers": (LayerAttention(8, True), *BASE.layers[1:])},
    ),
    "sliding_window": (
        9, [("layer_types", SLIDING)], {"layers": (LayerAttention(9, True),) * 3},
    ),
    "use_sliding_window": (
        True, [("max_window_layers", 1), ("sliding_window", 8)],
        {"layers": (BASE.layers[0], *(LayerAttention(8, True),) * 2)},
    ),
    "max_window_layers": (
        -1, [("use_sliding_window", True), ("sliding_window", 8)],
        {"layers": (LayerAttention(8, True),) * 3},
    ),
    "is_causal": (True, [], CAUSAL),
    "dflash_config.is_causal": (True, [], CAUSAL),
    "dflash_config.causal": (True, [], CAUSAL),
    "dflash_config.causal_head": (True, [], CAUSAL),
    "dflash_config.use_swa": (True, [("sliding_window", 8)], WINDOWED),
    "dflash_config.swa_window_size": (8, [SWA], WINDOWED),
    "draft_vocab_size": (32, [], {"draft_vocab_size": 32}),
    **{
        f"{place}{name}": (value, [(place + other, beside)], {"head": expected})
        for place in ("", "dflash_config.")
        for (name, value), (other, beside), expected in (
            (("selector_rank", 8), ("selector_top_k", 4), SELECTING),
            (("selector_top_k", 4), ("selector_rank", 8), SELECTING),
            (("conv_kernel_size", 2), ("conv_group_size", 8), CONVOLVED),
            (("conv_group_size", 8), ("conv_kernel_size", 2), CONVOLVED),
        )
    },
    **dict.fromkeys(NAMES, ({"quant_method": "fp8"}, [], {"quantization": FP8})),
    "target_hidden_size": (64, [], UnsupportedDraft),
    "dflash_config.target_hidden_size": (64, [], UnsupportedDraft),
    "eagle_aux_hidden_state_layer_ids": ([1, 3], [], UnsupportedDraft),
} | {
    # Beside it, null counts as missing, but SGLang does not read it as a multiplier.
    path: (
        value, [(other, value if name == "output_multiplier" else None)],
        {path.rpartition(".")[2]: expected},
    )
    for name, value, expected in (
        ("block_size", 8, 8),
        ("num_target_layers", 7, 7),
        ("mask_token_id", 9, 9),
        ("target_layer_ids", [0, 2, 5], (0, 2, 5)),
        ("output_multiplier", 0.5, 0.5),
        ("final_logit_softcapping", 30, 30.0),
    )
    for path, other in ((name, f"dflash_config.{name}"), (f"dflash_config.{name}", name))
}  # fmt: skip


def test_every_key_that_is_read_has_an_example() -> None:
    assert {path.rpartition(".")[2] for path in EXAMPLES} == read_keys()
    assert not read_keys() & TRAINING and not (read_keys() | TRAINING) & FOREIGN.keys()


@pytest.mark.parametrize("path", EXAMPLES)
def test_a_key_that_is_read_decides_something(path: str) -> None:
    value, beside, differs = EXAMPLES[path]
    if isinstance(differs, dict):
        assert config_with(*beside, (path, value)) == replace(BASE, **differs)
        return
    with pytest.raises(differs) as error:
        config_with(*beside, (path, value))
    assert type(error.value) is differs
    assert error.value.field == f"{path} in the draft's config.json"


@pytest.mark.parametrize("value", [True, 1, 0.5, "float16", {}, [], None])
def test_keys_of_training_change_nothing(value: Any) -> None:
    for place in ("", "dflash_config."):
        config = config_with(*((f"{place}{name}", value) for name in TRAINING))
        assert config == BASE and config.unknown_keys == ()


@pytest.mark.parametrize("place", ["", "dflash_config."])
@pytest.mark.parametrize("name", FOREIGN)
def test_a_key_of_other_drafts_goes_to_the_built_in_worker(name: str, place: str) -> None:
    neutral = [None, False, 0, "", *([1] if name.endswith("_scale") else [])]
    for value in [*neutral, "disabled"] if name == "gating" else neutral:
        config = config_with((place + name, value))
        assert config == BASE and config.unknown_keys == ()
    for value in (7, True, "domino", {"quant_method": "fp8"}, [1], {}):
        if value in neutral:
            continue
        with refused(f"{place}{name} in the draft's config.json", error=UnsupportedDraft):
            config_with((place + name, value))


@pytest.mark.parametrize("beside", [{}, {"draft_vocab_size": 64}, {"draft_vocab_size": 32}])
def test_an_lm_head_of_its_own_is_declared_by_draft_vocab_size(beside: dict[str, int]) -> None:
    """No `lm_head.weight` is read because of `has_lm_head`, and none is ignored in spite of it."""
    with pytest.raises(UnsupportedDraft) as error:
        config_with(("has_lm_head", True), *beside.items())
    assert "an lm_head of its own, but by draft_vocab_size" in error.value.required
    served = config_with(("has_lm_head", False), *beside.items())
    assert ("lm_head.weight" in expected_tensors(served)) == (32 in beside.values())


@bounded
@given(
    place=st.sampled_from(["", "dflash_config."]),
    name=st.text(st.characters(categories=["Ll"]), min_size=1),
    value=values,
)
def test_an_unknown_key_is_named_in_a_warning(place: str, name: str, value: Any) -> None:
    """Beside `dflash_config` stand keys of Transformers, too. Null is as good as nothing."""
    assume(name not in read_keys() | TRAINING | FOREIGN.keys())
    config = config_with((place + name, value))
    assert config == BASE
    assert config.unknown_keys == ((place + name,) if place and value is not None else ())
    warned = [str(found) for found in Options().resolve(config).warnings(config, {})]
    assert len(warned) == len(config.unknown_keys)
    assert all(cut(place + name) in line for line in warned)


@bounded
@given(
    place=st.sampled_from(["rope_scaling.", "rope_parameters."]),
    name=st.text(st.characters(categories=["Ll"]), min_size=1),
    value=values,
)
def test_an_unknown_key_of_the_rotary_embedding_is_refused(
    place: str, name: str, value: Any
) -> None:
    assume(value is not None and name not in ("factor", "type"))
    with refused(f"{place}{name} in the draft's config.json", error=UnsupportedDraft):
        config_with(("rope_scaling", {}), ("rope_parameters", {}), (f"{place}{name}", value))


PATHS = sorted({*read_keys(), *TRAINING, *FOREIGN, *EXAMPLES})


@bounded
@given(made=st.lists(st.tuples(st.sampled_from(PATHS), values), min_size=1, max_size=2))
def test_no_value_of_a_known_key_is_dropped(made: list[tuple[str, Any]]) -> None:
    """Keys that are read and do not change the config hold its defaults."""
    try:
        config = config_with(*made)
    except ConfigError:
        return
    if config != BASE:
        return
    for path, value in dict(made).items():
        if path in EXAMPLES and value is not None:
            name = path.rpartition(".")[2]
            by_default = {
                "is_causal": False, "causal": False, "causal_head": False, "use_swa": False,
                "use_sliding_window": False, "rope_is_neox_style": True, "is_neox_style": True,
                "v_head_dim": 16, "target_hidden_size": 32, "draft_vocab_size": 64,
                "eagle_aux_hidden_state_layer_ids": [2, 4], "partial_rotary_factor": 1,
                "final_logit_softcapping": 0, "output_multiplier": 1, "rope_scaling": {},
                "rope_parameters": {}, "layer_types": FULL, **raw_config(),
                **raw_config()["dflash_config"], "attention_bias": False,
                "hidden_act": "silu", "selector_rank": 0, "selector_top_k": 0,
                "conv_kernel_size": 0, "conv_group_size": 0,
            }  # fmt: skip
            # These two have no effect if no layer slides.
            assert name in ("sliding_window", "max_window_layers") or value == by_default[name]


CONTRADICTIONS = {
    "causality": [("is_causal", False), ("dflash_config.causal", True)],
    "causality of JetSpec": [("dflash_config.causal", False), ("dflash_config.causal_head", True)],
    "two block sizes": [("dflash_config.block_size", 8)],
    "two windows": [SWA, ("sliding_window", 9), ("dflash_config.swa_window_size", 8)],
    "no window": [SWA],
    "sliding layers without a window": [("layer_types", SLIDING), ("sliding_window", None)],
    "sliding layers that do not slide": [
        ("layer_types", SLIDING), ("sliding_window", 9), ("use_sliding_window", False),
    ],
    "two thetas": [("rope_parameters", {"rope_theta": 1e6})],
    "too large a vocabulary": [("draft_vocab_size", 65)],
    "half a selector": [("dflash_config.selector_rank", 8)],
    "half a convolution": [("dflash_config.conv_group_size", 8)],
}  # fmt: skip


def test_the_error_names_both_places() -> None:
    with pytest.raises(ConfigError) as error:
        config_with(*CONTRADICTIONS["two thetas"])
    assert str(error.value) == (
        "rope_theta in the draft's config.json: 10000.0; 1e+06, as in rope_parameters.rope_theta, "
        "is required"
    )


@pytest.mark.parametrize("what", CONTRADICTIONS)
def test_keys_that_contradict_each_other_are_refused(what: str) -> None:
    with pytest.raises(ConfigError) as error:
        config_with(*CONTRADICTIONS[what])
    assert not isinstance(error.value, UnsupportedDraft)


PUBLISHED = json.loads((Path(__file__).parent / "published_keys.json").read_text())


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs(name: str) -> None:
    """Whole files as their publishers have them, or as the named exporter writes them."""
    raw, key = PUBLISHED[name]["config"], PUBLISHED[name].get("refused")
    if key is None:
        config = DraftConfig.from_dict(raw)
        assert config.unknown_keys == ()
        assert [[la.sliding_window, la.causal] for la in config.layers] == PUBLISHED[name]["layers"]
        assert list(config.target_layer_ids) == PUBLISHED[name]["target_layer_ids"]
        return
    with refused(f"{key} in the draft's config.json", error=UnsupportedDraft):
        DraftConfig.from_dict(raw)


def test_the_layout_of_speculators_is_the_same_draft() -> None:
    known = replace(BASE, num_target_layers=None)
    assert DraftConfig.from_dict(layout(raw_config())) == known
    of_dflash2 = {"speculators_model_type": "dflash2", "selector_rank": 8, "selector_top_k": 4}
    config = DraftConfig.from_dict(layout(raw_config(), **of_dflash2))
    assert config == replace(known, head=SELECTING)
    slides = {"layer_types": SLIDING, "sliding_window": 8}
    for non_causal in (False, True):
        config = DraftConfig.from_dict(
            layout(raw_config(), **slides, sliding_window_non_causal=non_causal)
        )
        assert config == replace(known, layers=(LayerAttention(8, not non_causal),) * 3)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"speculators_model_type": "dspark"}, "speculators_model_type"),
        ({"aux_hidden_state_layer_ids": [0, 2]}, "aux_hidden_state_layer_ids"),
        ({"aux_hidden_state_layer_ids": None}, "aux_hidden_state_layer_ids"),
        ({"hidden_size": 64}, "hidden_size"),
        ({"transformer_layer_config": [1]}, "transformer_layer_config"),
        ({"sliding_window_non_causal": "no"}, "sliding_window_non_causal"),
        ({"sample_from_anchor": True}, "sample_from_anchor"),
        ({"target_hidden_size": 64}, "target_hidden_size"),
    ],
)
def test_other_keys_of_that_layout_are_refused(changes: dict[str, Any], field: str) -> None:
    """SGLang's worker reads no draft of that layout."""
    with pytest.raises(ConfigError) as error:
        DraftConfig.from_dict(layout(raw_config(), **changes))
    assert not isinstance(error.value, UnsupportedDraft)
    assert error.value.field == f"{field} in the draft's config.json"
