"""Rotary frequencies against Transformers' own, for every scaling that published drafts use."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from sglang_dflash.drafting.rope import Rotary, inverse_frequencies
from sglang_dflash.facts.draft_config import DraftConfig
from sglang_dflash.facts.errors import ConfigError, UnsupportedDraft
from sglang_dflash.facts.published import shipped
from tests.conftest import raw_config

YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 512}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 1024,
}
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "yarn": YARN,
    "yarn-named-by-type": {**{k: v for k, v in YARN.items() if k != "rope_type"}, "type": "yarn"},
    "yarn-betas": {**YARN, "beta_fast": 16, "beta_slow": 2},
    "yarn-betas-of-zero": {**YARN, "beta_fast": 0, "beta_slow": 0},
    "yarn-betas-equal": {**YARN, "beta_fast": 4, "beta_slow": 4, "truncate": False},
    "yarn-betas-reversed": {**YARN, "beta_fast": 2, "beta_slow": 16},
    "yarn-no-truncation": {**YARN, "truncate": False},
    "yarn-truncation": {**YARN, "truncate": True},
    "yarn-attention-factor": {**YARN, "attention_factor": 1.3},
    "yarn-attention-factor-before-mscale": {
        **YARN,
        "attention_factor": 1.3,
        "mscale": 0.5,
        "mscale_all_dim": 1.0,
    },
    "yarn-mscales": {**YARN, "mscale": 0.707, "mscale_all_dim": 1.5},
    "yarn-mscales-equal": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
    "yarn-mscale-only": {**YARN, "mscale": 0.707},
    "yarn-mscale-all-dim-only": {**YARN, "mscale_all_dim": 0.707},
    "yarn-mscale-all-dim-of-zero": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.0},
    "yarn-shrinking": {**YARN, "factor": 0.5, "mscale": 0.707, "mscale_all_dim": 1.5},
    "yarn-factor-not-the-ratio-of-contexts": {**YARN, "factor": 3.0},
    "yarn-original-context-missing": {"rope_type": "yarn", "factor": 4.0},
    "yarn-original-context-tiny": {**YARN, "original_max_position_embeddings": 2},
    "yarn-original-context-huge": {**YARN, "original_max_position_embeddings": 10**9},
    "llama3": LLAMA3,
    "llama3-original-context-missing": {
        k: v for k, v in LLAMA3.items() if k != "original_max_position_embeddings"
    },
}
# The target's own block (default of Transformers' GptOssConfig); the draft's block has no truncate.
GPT_OSS = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
SCALED_DRAFTS = [
    name for name, facts in shipped("draft").items() if (facts.config or {}).get("rope_scaling")
]


def assert_as_transformers(raw: dict[str, Any]) -> float:
    """Compare with Transformers on the same fields, and return the factor on cos and sin."""
    config = DraftConfig.from_dict(raw)
    ours, factor = inverse_frequencies(config.rope, config.head_dim, config.max_position_embeddings)
    names = (
        "hidden_size",
        "num_attention_heads",
        "head_dim",
        "max_position_embeddings",
        "rope_theta",
        "original_max_position_embeddings",
    )
    blocks = ("rope_scaling", "rope_parameters")
    copied = {
        name: dict(raw[name]) if name in blocks else raw[name]
        for name in (*names, *blocks)
        if name in raw
    }
    theirs = Qwen3Config(**copied)
    expected, expected_factor = ROPE_INIT_FUNCTIONS[theirs.rope_parameters["rope_type"]](
        theirs, torch.device("cpu")
    )
    torch.testing.assert_close(ours, expected, rtol=1e-6, atol=0)
    assert factor == pytest.approx(expected_factor)
    return factor


@pytest.mark.parametrize("name", SCALINGS)
def test_scaled_frequencies_are_transformers(name: str) -> None:
    assert_as_transformers(raw_config(rope_scaling=SCALINGS[name], rope_theta=50000.0, head_dim=64))


def test_the_newer_name_of_the_block_and_the_older_place_of_a_field() -> None:
    assert_as_transformers(raw_config(rope_parameters={**YARN, "rope_theta": 70000.0}, head_dim=64))
    both = raw_config(
        rope_scaling=YARN, rope_parameters={"rope_type": "default"}, rope_theta=70000.0
    )
    assert (
        DraftConfig.from_dict(both).rope
        == DraftConfig.from_dict(raw_config(rope_scaling=YARN, rope_theta=70000.0)).rope
    )
    assert_as_transformers(
        raw_config(rope_scaling=YARN, original_max_position_embeddings=1024, head_dim=64)
    )


@pytest.mark.parametrize("name", SCALED_DRAFTS)
def test_published_drafts_rotate_as_transformers_does(name: str) -> None:
    config = shipped("draft")[name].config
    assert config is not None
    assert_as_transformers(dict(config))


def test_published_scalings_in_numbers() -> None:
    kimi, oss = (
        dict(shipped("draft")[f"z-lab/{name}-DFlash"].config or {})
        for name in ("Kimi-K2.5", "gpt-oss-20b")
    )
    # Equal mscales cancel; without them the factor is 0.1 ln 32 + 1.
    assert assert_as_transformers(kimi) == 1.0
    assert assert_as_transformers(oss) == pytest.approx(1.3465736)
    truncated, exact = (
        DraftConfig.from_dict({**oss, "rope_scaling": scaling}).rope
        for scaling in (oss["rope_scaling"], GPT_OSS)
    )
    assert_as_transformers({**oss, "rope_scaling": GPT_OSS})
    assert not torch.allclose(
        inverse_frequencies(truncated, 64, 131072)[0],
        inverse_frequencies(exact, 64, 131072)[0],
        rtol=1e-3,
    )


INVALID = {
    r"rope_scaling.factor: missing from .* positive number": {
        "rope_scaling": {"rope_type": "yarn"}
    },
    r"rope_scaling.factor: 0 in .* positive number": {
        "rope_scaling": {"type": "linear", "factor": 0}
    },
    r"rope_scaling.factor: -8.0 in": {"rope_scaling": {**YARN, "factor": -8.0}},
    r"rope_scaling.factor: 'x' in": {"rope_scaling": {**YARN, "factor": "x"}},
    r"rope_scaling.factor: True in": {"rope_scaling": {**YARN, "factor": True}},
    r"rope_scaling.factor: nan in": {"rope_scaling": {**YARN, "factor": float("nan")}},
    r"rope_parameters.factor: missing from": {
        "rope_parameters": {"rope_type": "yarn", "factor": None}
    },
    r"rope_scaling.original_max_position_embeddings: 0 in": {
        "rope_scaling": {**YARN, "original_max_position_embeddings": 0}
    },
    r"rope_scaling.attention_factor: 0.0 in": {"rope_scaling": {**YARN, "attention_factor": 0.0}},
    r"rope_scaling.mscale: -1.0 in": {"rope_scaling": {**YARN, "mscale": -1.0}},
    r"rope_scaling.truncate: 'no' in .* true or false": {
        "rope_scaling": {**YARN, "truncate": "no"}
    },
    r"rope_scaling.high_freq_factor: 1.0 is not above low_freq_factor \(1.0\)": {
        "rope_scaling": {**LLAMA3, "high_freq_factor": 1.0}
    },
    r"rope_scaling.low_freq_factor: missing": {
        "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "high_freq_factor": 4.0}
    },
    r"rope_theta: 0 in .* positive number": {"rope_theta": 0},
}


@pytest.mark.parametrize("message", INVALID)
def test_invalid_scaling_is_named_with_its_value(message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        DraftConfig.from_dict(raw_config(**INVALID[message]))
    assert not isinstance(caught.value, UnsupportedDraft)


UNSUPPORTED = {
    "rope_scaling.attn_factor: 2.0; with rope_type 'yarn'": {
        "rope_scaling": {**YARN, "attn_factor": 2.0}
    },
    "rope_scaling.mscale: 1.0; with rope_type 'llama3'": {
        "rope_scaling": {**LLAMA3, "mscale": 1.0}
    },
    "rope_scaling.factor: 4.0; with rope_type 'default'": {"rope_scaling": {"factor": 4.0}},
    "rope_parameters.sliding_attention: ": {
        "rope_parameters": {"sliding_attention": {"rope_type": "yarn", "factor": 4.0}}
    },
    "partial_rotary_factor": {
        "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}
    },
    "mrope_section": {"rope_scaling": {"rope_type": "default", "mrope_section": [2, 3, 3]}},
    "rope_is_neox_style: False": {"rope_is_neox_style": False},
}


@pytest.mark.parametrize("reason", UNSUPPORTED)
def test_no_field_of_the_rotary_embedding_is_ignored(reason: str) -> None:
    with pytest.raises(UnsupportedDraft, match=reason):
        DraftConfig.from_dict(raw_config(**UNSUPPORTED[reason]))


def test_positions_have_no_end() -> None:
    """There is no table, so a position far beyond max_position_embeddings is valid."""
    rotary = Rotary(DraftConfig.from_dict(raw_config()).rope, 16, 64)
    cos, sin = rotary.cos_sin(torch.tensor([5, 1_000_000]), torch.float32)
    torch.testing.assert_close(cos**2 + sin**2, torch.ones_like(cos))
    exact = (1_000_000.0 * rotary.frequencies.double()).cos()
    # float32 angles of 1e6 radians are rounded to 1/16; only the fast half of the frequencies has
    # such angles.
    torch.testing.assert_close(cos[1, 0, 4:8].double(), exact[4:], atol=1e-2, rtol=0)
