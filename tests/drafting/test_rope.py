"""Rotary frequencies: what is read of a config reaches Transformers' formulas, and nothing of it is
ignored."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from sglang_dflash.checkpoint.draft_config import DraftConfig
from sglang_dflash.checkpoint.published import shipped
from sglang_dflash.common.errors import UnsupportedDraft
from sglang_dflash.drafting.rope import Rotary, inverse_frequencies
from tests.conftest import raw_config
from tests.errors import refused

YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 512}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
TYPED = {**YARN, "type": YARN["rope_type"]}
del TYPED["rope_type"]
FIELDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "linear": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "yarn by type": {"rope_scaling": TYPED},
    "yarn, all fields": {
        "rope_scaling": {
            **YARN, "beta_fast": 16, "beta_slow": 2, "mscale": 0.707, "mscale_all_dim": 1.5,
            "truncate": False,
        }
    },
    "yarn, no original context": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
    "yarn, another factor": {"rope_scaling": {**YARN, "factor": 3.0, "attention_factor": 1.3}},
    "llama3": {"rope_scaling": {**LLAMA3, "original_max_position_embeddings": 1024}},
    "llama3, no original context": {"rope_scaling": LLAMA3},
    "the newer name": {"rope_theta": None, "rope_parameters": {**YARN, "rope_theta": 70000.0}},
    "the older place": {"rope_scaling": YARN, "original_max_position_embeddings": 1024},
}  # fmt: skip
FIELDS = {name: raw_config(**{"rope_theta": 50000.0, **f}) for name, f in FIELDS.items()} | {
    name: dict(facts.config)
    for name, facts in shipped("draft").items()
    if facts.config is not None and "rope_scaling" in facts.config
}
NAMES = ("hidden_size", "num_attention_heads", "head_dim", "max_position_embeddings", "rope_theta",
         "original_max_position_embeddings")  # fmt: skip


@pytest.mark.parametrize("name", FIELDS)
def test_frequencies_are_transformers_for_the_same_config(name: str) -> None:
    raw = FIELDS[name]
    config = DraftConfig.from_dict(raw)
    ours, factor = inverse_frequencies(config.rope, config.head_dim, config.max_position_embeddings)
    copied: dict[str, Any] = {name: raw[name] for name in NAMES if raw.get(name) is not None}
    for block in {"rope_scaling", "rope_parameters"} & set(raw):
        copied[block] = dict(raw[block])
    theirs = Qwen3Config(**copied)
    kind = theirs.rope_parameters["rope_type"]
    if kind == "default":
        expected, expected_factor = 50000.0 ** (-torch.arange(8) / 8), 1.0
    else:
        expected, expected_factor = ROPE_INIT_FUNCTIONS[kind](theirs, torch.device("cpu"))
    torch.testing.assert_close(ours, expected, rtol=1e-6, atol=0)
    assert factor == pytest.approx(expected_factor)


def test_the_two_names_of_the_block_may_say_the_same() -> None:
    both = raw_config(rope_scaling=YARN, rope_parameters={**YARN, "rope_theta": 10000.0})
    one = raw_config(rope_scaling=YARN)
    assert DraftConfig.from_dict(both).rope == DraftConfig.from_dict(one).rope


UNSUPPORTED: dict[str, dict[str, Any]] = {
    "rope_scaling.attn_factor": {"rope_scaling": {**YARN, "attn_factor": 2.0}},
    "rope_scaling.mscale": {"rope_scaling": {**LLAMA3, "mscale": 1.0}},
    "rope_scaling.factor": {"rope_scaling": {"factor": 4.0}},
    "rope_scaling.rope_type": {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
    "rope_parameters.sliding_attention": {
        "rope_parameters": {"sliding_attention": {"rope_type": "yarn", "factor": 4.0}}
    },
    "rope_parameters.partial_rotary_factor": {"rope_parameters": {"partial_rotary_factor": 0.25}},
    "rope_scaling.mrope_section": {
        "rope_scaling": {"rope_type": "default", "mrope_section": [2, 3, 3]}
    },
    "rope_is_neox_style": {"rope_is_neox_style": False},
    "rope_parameters.rope_type": {
        "rope_scaling": YARN, "rope_parameters": {"rope_type": "default"}
    },
}  # fmt: skip


@pytest.mark.parametrize("field", UNSUPPORTED)
def test_no_field_of_the_rotary_embedding_is_ignored(field: str) -> None:
    with refused(f"{field} in the draft's config.json", error=UnsupportedDraft):
        DraftConfig.from_dict(raw_config(**UNSUPPORTED[field]))


def test_positions_have_no_end() -> None:
    """There is no table, so a position far beyond max_position_embeddings is valid."""
    rotary = Rotary(DraftConfig.from_dict(raw_config()).rope, 16, 64)
    cos, sin = rotary.cos_sin(torch.tensor([5, 1_000_000]), torch.float32)
    torch.testing.assert_close(cos**2 + sin**2, torch.ones_like(cos))
    exact = (1_000_000.0 * rotary.frequencies.double()).cos()
    # float32 angles of 1e6 radians are rounded to 1/16; only the fast half of the frequencies has
    # such angles.
    torch.testing.assert_close(cos[1, 0, 4:8].double(), exact[4:], atol=1e-2, rtol=0)
