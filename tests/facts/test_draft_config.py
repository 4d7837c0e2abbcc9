"""Draft configs and options: what is read, what is refused, and the message."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from sglang_dflash.drafting.options import Options
from sglang_dflash.facts.draft_config import (
    DraftConfig,
    LayerAttention,
    default_target_layer_ids,
)
from sglang_dflash.facts.errors import ConfigError, UnsupportedDraft
from tests.conftest import raw_config


def with_own(**own: Any) -> dict[str, Any]:
    return raw_config(dflash_config={**raw_config()["dflash_config"], **own})


def test_published_fields_are_read() -> None:
    config = DraftConfig.from_dict(raw_config())
    assert (
        config.block_size,
        config.mask_token_id,
        config.target_layer_ids,
        config.target_hidden_width,
    ) == (4, 63, (1, 3), 64)
    assert config.layers == (LayerAttention(None, False),) * 3
    assert config.kv_shape == (3, 2, 2, 16)


def test_sliding_layers_are_causal_unless_the_config_denies_it() -> None:
    types = {
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "sliding_window": 9,
    }
    sliding, full = LayerAttention(9, True), LayerAttention(None, False)
    assert DraftConfig.from_dict(raw_config(**types)).layers == (sliding, full, sliding)
    assert DraftConfig.from_dict(raw_config(**types, is_causal=False)).layers[0] == LayerAttention(
        9, False
    )


@pytest.mark.parametrize(
    ("layers", "depth", "ids"),
    [(36, 5, (1, 9, 17, 25, 33)), (64, 5, (1, 16, 31, 46, 61)), (8, 1, (4,))],
)
def test_default_layers_are_the_published_ones(layers: int, depth: int, ids: tuple) -> None:
    assert default_target_layer_ids(layers, depth) == ids


INVALID = {
    r"block_size: 1 drafts nothing": raw_config(block_size=1),
    r"block_size: 'x' .* positive integer": raw_config(block_size="x"),
    r"hidden_size: missing": {k: v for k, v in raw_config().items() if k != "hidden_size"},
    r"num_key_value_heads: 3 does not divide num_attention_heads \(4\)": raw_config(
        num_key_value_heads=3
    ),
    r"mask_token_id: 64 is outside the vocabulary of 64": with_own(mask_token_id=64),
    r"mask_token_id: -1 in .* a token id": with_own(mask_token_id=-1),
    r"target_layer_ids: \[6\] outside the target's layers 0 to 5": with_own(
        target_layer_ids=[1, 6]
    ),
    r"target_layer_ids: \[\] in .* a non-empty list": with_own(target_layer_ids=[]),
    r"layer_types: 1 entries for 3 layers": raw_config(layer_types=["full_attention"]),
    r"sliding_window: None, but layer_types\[0\]": raw_config(
        layer_types=["sliding_attention"] * 3
    ),
}


@pytest.mark.parametrize("message", INVALID)
def test_invalid_fields_are_named_with_their_value(message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        DraftConfig.from_dict(INVALID[message])
    assert not isinstance(caught.value, UnsupportedDraft)


UNSUPPORTED = {
    "selector_rank: 256": with_own(selector_rank=256, selector_top_k=16),
    "projector_type: 'domino'": with_own(projector_type="domino"),
    "attention_sink_bias: True": with_own(attention_sink_bias=True),
    "quantization_config": raw_config(quantization_config={"quant_method": "fp8"}),
    "hidden_act: 'gelu'": raw_config(hidden_act="gelu"),
    "rope_scaling.rope_type: 'dynamic'": raw_config(
        rope_scaling={"rope_type": "dynamic", "factor": 2.0}
    ),
    r"layer_types\[0\]: 'linear_attention'": raw_config(layer_types=["linear_attention"] * 3),
    "mask_token_id: missing": raw_config(dflash_config={"target_layer_ids": [1]}),
}


@pytest.mark.parametrize("reason", UNSUPPORTED)
def test_other_heads_are_told_apart_from_mistakes(reason: str) -> None:
    with pytest.raises(UnsupportedDraft, match=reason):
        DraftConfig.from_dict(UNSUPPORTED[reason])


def test_damaged_json_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(raw_config())[:-5])
    with pytest.raises(ConfigError, match=r"config\.json' is not valid JSON"):
        DraftConfig.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ({"hidden_size": 48}, r"hidden_size: the draft's is 32, the target's 48"),
        ({"vocab_size": 99}, r"vocab_size: the draft's is 64, the target's 99"),
        (
            {"num_layers": 4},
            r"num_target_layers: the draft was trained on 6 target layers, this target has 4",
        ),
    ],
)
def test_a_pair_that_does_not_fit_is_refused(target: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DraftConfig.from_dict(raw_config()).check_target(
            **{"hidden_size": 32, "vocab_size": 64, "num_layers": 6, **target}
        )


@pytest.mark.parametrize(
    ("options", "required"),
    [
        ({"block_size": 1}, "a number of tokens from 2 to 2147483647 is required"),
        ({"sinks": -1}, "from 0 to"),
        ({"window": 0}, "from 1 to"),
        ({"draft_kv_tokens": 0}, "from 1 to"),
        ({"sinks": 4}, "no effect without a window; give {window} too"),
        ({"window": 2**31}, "to 2147483647"),
        ({"block_size": 65}, "more than 16 times .* give at most 64"),
        ({"window": 3}, "smaller than the block size; give at least 4"),
        ({"recurrent_rollback": "undo"}, "auto, replay, snapshot"),
    ],
)
def test_options_are_checked(options: dict, required: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Options(**options).resolve(DraftConfig.from_dict(raw_config()))
    ((field, value),) = options.items()
    assert (refused.value.field, refused.value.value) == (field, value)
    assert re.search(required, refused.value.required)


def test_options_take_the_checkpoints_block_size_and_size_the_cache() -> None:
    resolved = Options(window=100, sinks=4).resolve(DraftConfig.from_dict(raw_config()))
    assert resolved.block_size == 4
    assert resolved.draft_kv_entries(16) == 2 * 16 * (100 + 4 + 4)
    chosen = Options(window=100, draft_kv_tokens=7).resolve(DraftConfig.from_dict(raw_config()))
    assert chosen.draft_kv_entries(16) == 7
