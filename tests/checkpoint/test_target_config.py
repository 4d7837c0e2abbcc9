"""Facts that are read from a target's config.json."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_type_hints

import pytest
from sglang.srt.arg_groups.fields.schedule import Schedule
from sglang.srt.configs import KimiLinearConfig, Lfm2Config
from sglang.srt.configs.model_config import is_hybrid_swa_model
from sglang.srt.configs.nemotron_h import NemotronHConfig
from sglang.srt.utils.hf_transformers.common import get_context_length
from transformers import AutoConfig

from sglang_dflash.checkpoint import target_config
from sglang_dflash.checkpoint.target_config import TargetGeometry, context_of
from sglang_dflash.memory.sizes import SLIDING_SHARE, state_bytes, target_kv_bytes
from sglang_dflash.tools.demo_pairs.pairs import demo_pair
from tests.checkpoint.target_fields import GDN, TARGET
from tests.errors import refused


def test_only_attention_layers_keep_kv() -> None:
    dense = TargetGeometry.from_dict(TARGET)
    assert (dense.attention_layers, dense.recurrent_layers) == (6, 0)
    assert dense.recurrent is None
    assert target_kv_bytes(dense, 2) == 6 * 2 * 2 * 16 * 2
    by_interval = TargetGeometry.from_dict(
        {"text_config": {**TARGET, "full_attention_interval": 4, **GDN}}
    )
    types = ["linear_attention"] * 3 + ["full_attention"] + ["linear_attention"] * 2
    assert by_interval == TargetGeometry.from_dict({**TARGET, "layer_types": types, **GDN})
    assert (by_interval.attention_layers, by_interval.recurrent_layers) == (1, 5)
    assert by_interval.recurrent is not None
    assert state_bytes(by_interval.recurrent) == 5 * (3 * 7 * 5 * 4 + (2 * 2 * 5 + 3 * 7) * 3 * 2)


def test_a_recurrent_state_of_unknown_shape_is_none() -> None:
    geometry = TargetGeometry.from_dict({**TARGET, "full_attention_interval": 2})
    assert geometry.recurrent_layers == 3 and geometry.recurrent is None


@pytest.mark.parametrize(
    ("change", "field", "value"),
    [
        ({"num_hidden_layers": None}, "num_hidden_layers", ...),
        ({"hidden_size": "32"}, "hidden_size", "32"),
        ({"layer_types": ["full_attention"]}, "layer_types", ["full_attention"]),
        ({"kv_lora_rank": 512}, "qk_rope_head_dim", ...),
        ({"kv_lora_rank": "512"}, "kv_lora_rank", "512"),
    ],
)
def test_target_fields_are_named(change: dict[str, Any], field: str, value: Any) -> None:
    with refused(f"{field} in the target's config.json", value):
        TargetGeometry.from_dict({**TARGET, **change})
    # A field that is missing may be missing at either place.
    nested = "" if value is ... else "text_config."
    with refused(f"{nested}{field} in the target's config.json", value):
        TargetGeometry.from_dict({"text_config": {**TARGET, **change}})


def test_sliding_layers_with_a_pool_of_their_own_cost_a_part() -> None:
    """These are the architectures for which SGLang has such a pool, by its own list."""
    every = target_kv_bytes(TargetGeometry.from_dict(TARGET), 2)
    raw = {**TARGET, "layer_types": ["sliding_attention", "full_attention"] * 3}
    assert target_kv_bytes(TargetGeometry.from_dict(raw), 2) == every
    for name in target_config._POOLED:
        assert is_hybrid_swa_model([name], SimpleNamespace(sliding_window=128))
        pooled = TargetGeometry.from_dict({**raw, "architectures": [name]})
        assert pooled.sliding_layers == 3
        assert target_kv_bytes(pooled, 2) == int(every * (3 + 3 * SLIDING_SHARE) / 6)
    flag = get_type_hints(Schedule, include_extras=True)["swa_full_tokens_ratio"]
    assert flag.__metadata__[0].fallback == float(SLIDING_SHARE)
    # Transformers' default, which published copies of the config leave out.
    by_default = TargetGeometry.from_dict({**TARGET, "architectures": ["GptOssForCausalLM"]})
    assert by_default.sliding_layers == 3


ORIGINAL = {"original_max_position_embeddings": 25}
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROPE = {"rope_theta": 10000.0}


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
        {"rope_scaling": {"type": "dynamic", "factor": 2.5}},
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, **ROPE}},
        {"rope_scaling": {"rope_type": "linear", "factor": 4.0, **ORIGINAL}},
        # Transformers adds the original length.
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        {"rope_scaling": {"type": "yarn", "factor": 4.0}},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, **ORIGINAL}},
        {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, **LLAMA3}},
        {"seq_length": 200},
        {"model_max_length": 200, "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    ],
)
@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_the_context_is_that_which_sglang_derives(model_type: str, change: dict[str, Any]) -> None:
    raw = {**TARGET, "model_type": model_type, "max_position_embeddings": 100, **change}
    sglang = get_context_length(AutoConfig.for_model(**copy.deepcopy(raw)))
    assert context_of(raw) == sglang
    assert context_of({"text_config": raw}) == sglang


def test_a_context_that_the_config_does_not_tell_is_none() -> None:
    assert context_of(TARGET) is None
    with refused("rope_scaling.factor in the target's config.json", "x"):
        context_of({"max_position_embeddings": 1, "rope_scaling": {"factor": "x"}})


LFM2_ATTENTION = [2, 5, 8]
KDA = {"num_heads": 4, "head_dim": 8, "short_conv_kernel_size": 4, "full_attn_layers": [4, 8]}


@pytest.mark.parametrize(
    ("sglang", "hidden"),
    [
        (Lfm2Config(num_hidden_layers=10, full_attn_idxs=LFM2_ATTENTION), ()),
        # Published copies have one of the two.
        (Lfm2Config(num_hidden_layers=10, full_attn_idxs=LFM2_ATTENTION), ("layer_types",)),
        (
            KimiLinearConfig(
                num_hidden_layers=9, linear_attn_config={"kda_layers": [1, 2, 3, 5, 6, 7, 9], **KDA}
            ),
            (),
        ),
    ],
)
def test_layers_that_keep_kv_are_counted_as_sglang_does(sglang: Any, hidden: Sequence[str]) -> None:
    raw = sglang.to_dict() | {"full_attn_idxs": getattr(sglang, "full_attn_idxs", None)}
    found = TargetGeometry.from_dict({k: v for k, v in raw.items() if k not in hidden})
    assert found.attention_layers == len(sglang.full_attention_layer_ids)
    assert found.recurrent_layers == len(sglang.linear_layer_ids)


BLOCKS = ["mamba", "moe", "attention", "mlp", "mamba", "attention", "mamba"]


@pytest.mark.parametrize(
    "layers",
    [
        {"layers_block_type": BLOCKS},
        {"layers_block_type": BLOCKS, "num_hidden_layers": 9, "hybrid_override_pattern": "M*"},
        {"hybrid_override_pattern": "ME*-M*M"},
    ],
)
def test_the_layers_of_a_nemotron_h_are_those_that_sglang_reads(layers: dict[str, Any]) -> None:
    sizes = {name: value for name, value in TARGET.items() if name != "num_hidden_layers"}
    sglang = NemotronHConfig(**sizes, **layers)
    read = TargetGeometry.from_dict({"model_type": "nemotron_h", **sizes, **layers})
    assert read.num_hidden_layers == sglang.num_hidden_layers == 7
    assert read.attention_layers == len(sglang.full_attention_layer_ids) == 2
    assert read.recurrent_layers == len(sglang.mamba_layer_ids) == 3
    assert target_kv_bytes(read, 2) == 2 * 2 * 2 * 16 * 2


@pytest.mark.parametrize(
    "layers",
    [
        {"layers_block_type": ["linear_attention", "full_attention"]},
        {"layers_block_type": "M*"},
        {"hybrid_override_pattern": "M*x"},
        {"hybrid_override_pattern": "MMM"},
    ],
)
def test_other_layers_of_a_nemotron_h_are_refused(layers: dict[str, Any]) -> None:
    """The first is what Transformers writes, and SGLang does not read."""
    ((name, value),) = layers.items()
    with refused(f"{name} in the target's config.json", value):
        TargetGeometry.from_dict({**TARGET, "model_type": "nemotron_h", **layers})


def test_a_target_is_read_from_its_folder(tmp_path: Path) -> None:
    with refused("target checkpoint", str(tmp_path)):
        TargetGeometry.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(TARGET))
    assert TargetGeometry.from_pretrained(tmp_path) == TargetGeometry.from_dict(TARGET)


@pytest.mark.parametrize(("kind", "is_hybrid"), [("dense", False), ("hybrid", True)])
def test_an_embedded_pair_tells_whether_it_is_hybrid(kind: str, is_hybrid: bool) -> None:
    assert demo_pair(kind).is_hybrid == is_hybrid
