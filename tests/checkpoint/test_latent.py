"""The K/V of targets with latent attention, and of the indexers of sparse attention, is what SGLang
counts."""

from __future__ import annotations

from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.configs.model_config import is_deepseek_dsa
from sglang.srt.layers.cp import utils as cp_utils
from sglang.srt.mem_cache import kv_cache_configurator
from sglang.srt.model_executor import pool_configurator

from sglang_dflash.checkpoint.latent import INDEXED
from sglang_dflash.checkpoint.target_classes import TARGETS
from sglang_dflash.checkpoint.target_config import TargetGeometry
from sglang_dflash.memory.sizes import target_kv_bytes
from tests.checkpoint.target_fields import TARGET
from tests.errors import refused

MLA = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
DSA = {
    **TARGET, **MLA, "architectures": ["DeepseekV32ForCausalLM"], "index_topk": 2048,
    "index_head_dim": 128,
}  # fmt: skip
LINEAR = ["linear_attention", "full_attention", "linear_attention"] * 2


def test_latent_attention_keeps_one_vector_per_token_and_layer() -> None:
    geometry = TargetGeometry.from_dict({**TARGET, **MLA})
    assert target_kv_bytes(geometry, 2) == 6 * (512 + 64) * 2
    assert target_kv_bytes(geometry, 1) == 6 * (512 + 64)


def test_the_architectures_with_indexers_are_those_of_sglang() -> None:
    indexed = {
        name
        for name in TARGETS
        if is_deepseek_dsa(SimpleNamespace(architectures=[name], index_topk=2048))
    }
    assert set(INDEXED) == indexed
    # Another, and one without an indexer.
    for raw in ({**DSA, "architectures": ["KimiK25ForConditionalGeneration"]}, {**TARGET, **MLA}):
        assert target_kv_bytes(TargetGeometry.from_dict(raw), 2) == 6 * (512 + 64) * 2


def sglangs_bytes(raw: dict[str, Any], dtype: torch.dtype, patch: pytest.MonkeyPatch) -> int:
    """The bytes of a token by SGLang's sizing on an H100, without a draft."""
    layers = [i for i, name in enumerate(raw.get("layer_types", "*" * 6)) if "linear" not in name]
    facts = {
        "get_memory": {"enable_hisparse": False, "enable_unified_cache_external_linker": False},
        "get_exec": {
            "kernel": SimpleNamespace(dsa_prefill_backend="flashmla_kv", dsa_decode_backend="fa3")
        },
        "get_disagg": {"disaggregation_mode": "null"},
        "get_parallel": {
            "attn_tp_size": 1, "attn_dcp_size": 1, "enable_dsa_cache_layer_split": False
        },
    }  # fmt: skip
    for (name, values), module in product(
        facts.items(), (pool_configurator, kv_cache_configurator, cp_utils)
    ):
        patch.setattr(module, name, partial(SimpleNamespace, **values), raising=False)
    kvc = SimpleNamespace(
        model_config=SimpleNamespace(hf_config=SimpleNamespace(**raw), **MLA),
        kv_cache_dtype=dtype, is_draft_worker=False, use_mla_backend=True,
        server_args=SimpleNamespace(enable_hisparse=False),
        layer_info=SimpleNamespace(start_layer=0, end_layer=6),
        mambaish_config=SimpleNamespace(full_attention_layer_ids=layers),
    )  # fmt: skip
    configurator = object.__new__(pool_configurator.DefaultPoolConfigurator)
    return configurator._compute_cell_size(kvc, len(layers))


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"index_kpool": 4},
        {"index_topk_freq": 4},
        {"index_topk_freq": 3, "index_skip_topk_offset": 3},
        {"index_topk_pattern": "FSSFS"},
        {"indexer_types": ["full", "shared", "shared", "full", "shared", "full"]},
        {"architectures": ["Glm5NextForConditionalGeneration"], "layer_types": LINEAR},
        {
            "architectures": ["Glm5NextForConditionalGeneration"],
            "layer_types": LINEAR,
            "index_topk_freq": 3,
        },
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_an_indexer_is_counted_as_sglang_does(
    change: dict[str, Any], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = {**DSA, **change}
    geometry = TargetGeometry.from_dict(raw)
    assert target_kv_bytes(geometry, dtype.itemsize) == sglangs_bytes(raw, dtype, monkeypatch)


def test_deepseek_v3_2_takes_an_eighth_more_than_its_latent() -> None:
    """Not the 576 numbers of a layer alone."""
    geometry = TargetGeometry.from_dict({**DSA, "num_hidden_layers": 61})
    assert target_kv_bytes(geometry, 2) == 61 * (2 * 576 + 128 + 4)
    assert target_kv_bytes(geometry, 1) == 61 * (512 + 16 + 128 + 128 + 4)


def test_layers_of_linear_attention_by_number_have_no_indexer() -> None:
    """Layers are counted from 0, as GLM-5 Next does."""
    raw = {**DSA, "linear_attn_config": {"kda_layers": [0, 2, 3, 5]}}
    by_name = {**DSA, "layer_types": LINEAR}
    for freq in (1, 3):
        numbered, named = (
            TargetGeometry.from_dict({**each, "index_topk_freq": freq}) for each in (raw, by_name)
        )
        assert numbered.latent == named.latent
        assert target_kv_bytes(numbered, 2) == target_kv_bytes(named, 2)


def test_fields_of_an_indexer_are_named() -> None:
    with refused("index_head_dim in the target's config.json", ...):
        TargetGeometry.from_dict({**DSA, "index_head_dim": None})
    with refused("index_topk_freq in the target's config.json", 0):
        TargetGeometry.from_dict({**DSA, "index_topk_freq": 0})
