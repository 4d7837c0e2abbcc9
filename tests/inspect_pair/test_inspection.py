"""What a pair costs: the arithmetic by hand, the shipped facts, and the command."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from sglang_dflash import cli
from sglang_dflash.checkpoint.draft_config import DraftConfig
from sglang_dflash.checkpoint.embedded import demo_pair
from sglang_dflash.checkpoint.errors import ConfigError
from sglang_dflash.checkpoint.published import ModelFacts, collection, look_up, shipped
from sglang_dflash.checkpoint.target_config import TargetGeometry
from sglang_dflash.core.options import DRAFT_KV_HEADROOM, Options
from sglang_dflash.inspect_pair.inspection import (
    GIB,
    Serving,
    draft_weight_bytes,
    inspect,
    split_kv,
)
from tests.conftest import raw_config

PAIRS = [
    ("Qwen/Qwen3.5-27B", "z-lab/Qwen3.5-27B-DFlash"),
    ("Qwen/Qwen3.5-35B-A3B", "z-lab/Qwen3.5-35B-A3B-DFlash"),
    ("Qwen/Qwen3-8B", "z-lab/Qwen3-8B-DFlash-b16"),
    ("Qwen/Qwen3-4B", "z-lab/Qwen3-4B-DFlash-b16"),
    ("Qwen/Qwen3.5-27B", "z-lab/Qwen3.5-27B-DFlash@5-layers"),
    ("Qwen/Qwen3.5-35B-A3B", "z-lab/Qwen3.5-35B-A3B-DFlash@8-layers"),
    ("Qwen/Qwen3.6-27B", "z-lab/Qwen3.6-27B-DFlash"),
    ("Qwen/Qwen3.6-35B-A3B", "z-lab/Qwen3.6-35B-A3B-DFlash"),
]
# GiB of the published checkpoints, where somebody has listed them.
PUBLISHED_GIB = {
    "Kimi-K2.5-DFlash": 6.48, "Qwen3.5-4B-DFlash": 1.18, "Qwen3.5-9B-DFlash": 2.41, "Qwen3.5-27B-DFlash": 3.96,
    "Qwen3.5-35B-A3B-DFlash": 0.72, "Qwen3.5-122B-A10B-DFlash": 1.44, "Qwen3.6-27B-DFlash": 3.22,
    "Qwen3.6-35B-A3B-DFlash": 0.72, "gpt-oss-20b-DFlash": 1.46, "gpt-oss-120b-DFlash": 1.46, "Qwen3-Coder-Next-DFlash": 0.88,
    "Qwen3-Coder-30B-A3B-DFlash": 0.88, "Qwen3-4B-DFlash-b16": 1.00, "Qwen3-8B-DFlash-b16": 1.95,
    "LLaMA3.1-8B-Instruct-DFlash-UltraChat": 1.95, "Qwen3.5-27B-DFlash@5-layers": 3.22, "Qwen3.5-35B-A3B-DFlash@8-layers": 0.884,
}  # fmt: skip
TARGET = {
    "hidden_size": 32,
    "vocab_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
GDN = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 3,
    "linear_key_head_dim": 5,
    "linear_value_head_dim": 7,
    "linear_conv_kernel_dim": 4,
}


def model(
    config: dict[str, Any] | None, weight_bytes: int | None = 0, kv: int | None = None
) -> ModelFacts:
    return ModelFacts("a model", config, weight_bytes, kv, "a test")


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert cli.main(["inspect", *arguments, "--offline", "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.main(["inspect", *arguments, "--offline"]) == 1
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.startswith("sglang-dflash: ")
    return shown.err


# -- geometry


def test_only_attention_layers_keep_kv() -> None:
    dense = TargetGeometry.from_dict(TARGET)
    assert (dense.attention_layers, dense.recurrent_layers, dense.recurrent_state_bytes) == (
        6,
        0,
        0,
    )
    assert dense.kv_bytes_per_token(2) == 6 * 2 * 2 * 16 * 2
    by_interval = TargetGeometry.from_dict(
        {"text_config": {**TARGET, "full_attention_interval": 4, **GDN}}
    )
    types = ["linear_attention"] * 3 + ["full_attention"] + ["linear_attention"] * 2
    assert by_interval == TargetGeometry.from_dict({**TARGET, "layer_types": types, **GDN})
    assert (by_interval.attention_layers, by_interval.recurrent_layers) == (1, 5)
    assert by_interval.recurrent_state_bytes == 5 * (3 * 7 * 5 * 4 + (2 * 2 * 5 + 3 * 7) * 3 * 2)


def test_an_untold_recurrent_state_is_none() -> None:
    assert (
        TargetGeometry.from_dict({**TARGET, "full_attention_interval": 2}).recurrent_state_bytes
        is None
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": None}, "num_hidden_layers: missing"),
        ({"hidden_size": "32"}, "hidden_size: '32'"),
        ({"layer_types": ["full_attention"]}, "layer_types: 1 entries for 6 layers"),
        ({"kv_lora_rank": 512}, "kv_lora_rank: 512"),
    ],
)
def test_target_fields_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TargetGeometry.from_dict({**TARGET, **change})


def test_draft_weights_by_hand() -> None:
    attention = 32 * 64 + 2 * 32 * 32 + 64 * 32
    layer = attention + 3 * 32 * 48 + 2 * 32 + 2 * 16
    assert draft_weight_bytes(DraftConfig.from_dict(raw_config())) == 2 * (
        2 * 32 * 32 + 3 * layer + 2 * 32
    )
    biases = 3 * (64 + 32 + 32 + 32)
    assert draft_weight_bytes(DraftConfig.from_dict(raw_config(attention_bias=True))) == 2 * (
        2 * 32 * 32 + 3 * layer + 2 * 32 + biases
    )


# -- memory


def test_a_bounded_cache_leaves_the_rest_to_the_target() -> None:
    split = split_kv(12_000, 100, 20, slots=30)
    assert split.bounded and (
        split.draft_kv_slots,
        split.draft_kv_bytes,
        split.draft_kv_bytes_unbounded,
    ) == (30, 600, 2000)
    assert (
        split.target_tokens,
        split.target_tokens_unbounded,
        split.target_tokens_without_draft_kv,
    ) == (114, 100, 120)
    assert split.target_tokens_gain == pytest.approx(
        0.14
    ) and split.target_tokens_gain_ceiling == pytest.approx(0.2)


@pytest.mark.parametrize("slots", [None, 100, 5000])
def test_a_cache_larger_than_the_targets_pool_has_one_slot_per_token(slots: int | None) -> None:
    split = split_kv(12_000, 100, 20, slots)
    assert not split.bounded and (
        split.draft_kv_slots,
        split.draft_kv_bytes,
        split.target_tokens,
    ) == (100, 2000, 100)
    assert split.target_tokens_gain == 0


def test_memory_is_what_weights_and_states_leave() -> None:
    target = model({**TARGET, "full_attention_interval": 2, **GDN}, GIB)
    serving = Serving(max_running_requests=10, memory_gib=4, mem_fraction=0.5)
    found = inspect(target, model(raw_config()), Options(), serving)
    state = 3 * (3 * 7 * 5 * 4 + (2 * 2 * 5 + 3 * 7) * 3 * 2)
    # Block 4: 4 + 4 - 2 inputs of a convolution of width 4, 3 before them, and two gates of 3 heads per token.
    replay = 3 * ((2 * 2 * 5 + 3 * 7) * (6 + 3) + 2 * 4 * 3) * 2
    assert (found.recurrent_replay_bytes, found.recurrent_snapshot_bytes) == (
        replay,
        3 * (4 * 3 * 7 * 5 * 4 + 41 * 6 * 2),
    )
    assert found.kv_memory_bytes == 2 * GIB - GIB - draft_weight_bytes(
        DraftConfig.from_dict(raw_config())
    ) - 10 * (state + replay)
    assert found.worker == "sglang-dflash" and found.recurrent_layers == 3


def test_options_size_the_cache_and_dtypes_its_entries() -> None:
    serving = Serving(
        max_running_requests=3, kv_memory_gib=1, kv_dtype="fp8_e4m3", draft_kv_dtype="float32"
    )
    report = inspect(
        model(TARGET), model(raw_config()), Options(window=100, sinks=4), serving
    ).report()
    assert report["draft_kv_slots"] == int(DRAFT_KV_HEADROOM * 3 * (100 + 4 + 4))
    assert (report["target_kv_bytes_per_token"], report["draft_kv_bytes_per_token"]) == (
        6 * 2 * 2 * 16,
        3 * 2 * 2 * 16 * 4,
    )
    assert (report["worker"], report["block_size"], report["draft_kv_map"]) == (
        "sglang-dflash",
        4,
        "bounded",
    )
    chosen = inspect(
        model(TARGET), model(raw_config()), Options(window=100, draft_kv_tokens=7), serving
    )
    assert chosen.kv.draft_kv_slots == 7
    inherited = Serving(kv_memory_gib=1, kv_dtype="fp8_e4m3")
    assert (
        inspect(model(TARGET), model(raw_config()), Options(), inherited).draft_kv_bytes_per_token
        == 3 * 2 * 2 * 16
    )


SAYS = {
    "draft_layers": "2 sliding (window 8, causal), 1 full",
    "target_layers": "6 attention",
    "target_layer_ids": [1, 3],
    "mask_token_id": 63,
    "draft_rope": "theta 10000, yarn with factor 4",
    "draft_dtype": "bfloat16",
    "target_dtype": "float16",
    "draft_architecture": "DFlashDraftModel",
    "target_architecture": "Qwen3ForCausalLM",
    "draft_context": 4096,
    "target_context": 512,
    "target_vocab_size": 64,
    "target_hidden_size": 32,
    "recurrent_rollback": None,
}


def test_what_the_configs_say_is_in_the_report() -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0}
    layers = {"layer_types": ["sliding_attention"] * 2 + ["full_attention"], "sliding_window": 8}
    draft = raw_config(**layers, rope_scaling=scaling, dtype="bfloat16")
    target = {
        **TARGET,
        "architectures": ["Qwen3ForCausalLM"],
        "torch_dtype": "float16",
        "max_position_embeddings": 512,
    }
    report = inspect(model(target), model(draft), Options(), Serving(kv_memory_gib=1)).report()
    assert {name: report[name] for name in SAYS} == SAYS
    for change, words in [
        ({"is_causal": False}, "2 sliding (window 8), 1 full"),
        ({"is_causal": True, **ALL_FULL}, "3 full (causal)"),
    ]:
        report = inspect(
            model(target), model({**draft, **change}), Options(), Serving(kv_memory_gib=1)
        ).report()
        assert report["draft_layers"] == words


ALL_FULL = {"layer_types": ["full_attention"] * 3}


def test_a_hybrid_target_says_how_it_rolls_back() -> None:
    serving = Serving(kv_memory_gib=1)
    told = {**TARGET, "full_attention_interval": 2}
    for target, draft, rollback in [
        ({**told, **GDN}, raw_config(), "replay"),
        (told, raw_config(), "snapshot"),
        ({**told, **GDN}, raw_config(selector_rank=256), "snapshot"),
    ]:
        report = inspect(model(target), model(draft), Options(), serving).report()
        assert (report["recurrent_rollback"], report["target_layers"]) == (
            rollback,
            "3 recurrent, 3 attention",
        )


def test_a_quantized_head_goes_to_the_builtin_worker() -> None:
    serving = Serving(kv_memory_gib=1)
    for lm_head, worker in ((True, "builtin"), (False, "sglang-dflash")):
        target = {**TARGET, "quantization_config": {"quant_method": "gptq", "lm_head": lm_head}}
        assert inspect(model(target), model(raw_config()), Options(), serving).worker == worker


def test_what_was_not_seen_decides_nothing() -> None:
    raw = raw_config(dflash_config={"target_layer_ids": [1, 3]})
    partly = ModelFacts("a draft", raw, 0, None, "a test", unknown=("dflash_config.mask_token_id",))
    found = inspect(model(TARGET), partly, Options(), Serving(kv_memory_gib=1))
    assert (
        found.worker == "unknown"
        and found.worker_reason
        == "not seen of the draft's config.json: dflash_config.mask_token_id"
    )
    assert found.report()["mask_token_id"] is None and found.report()["draft_layers"] == "3 full"
    with pytest.raises(ConfigError, match="vocab_size: the draft's is 64, the target's 65"):
        inspect(model({**TARGET, "vocab_size": 65}), partly, Options(), Serving(kv_memory_gib=1))


def test_a_draft_for_the_builtin_worker_is_no_error() -> None:
    serving = Serving(kv_memory_gib=1)
    found = inspect(model(TARGET), model(raw_config(selector_rank=256)), Options(), serving)
    assert found.worker == "builtin" and str(found.worker_reason).startswith("selector_rank: 256")
    assert found.draft_kv_bytes_per_token == 3 * 2 * 2 * 16 * 2 and found.block_size == 4


@pytest.mark.parametrize(
    ("serving", "message"),
    [
        ({"max_running_requests": 0}, "--max-running-requests: 0"),
        ({"mem_fraction": 1.5}, "--mem-fraction: 1.5"),
        ({"memory_gib": -1.0}, "--memory-gib: -1.0"),
        ({"kv_memory_gib": float("nan")}, "--kv-memory-gib: nan"),
        ({"kv_dtype": "int3"}, "--kv-dtype: 'int3'; there is bfloat16"),
        (
            {"kv_memory_gib": 1e-8},
            "--kv-memory-gib: 9.31323e-09 GiB of KV memory do not hold one token",
        ),
        ({"memory_gib": 1.0}, "--memory-gib 1 x --mem-fraction 0.9: the weights alone do not fit"),
    ],
)
def test_serving_is_checked(serving: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        inspect(model(TARGET, GIB), model(raw_config()), Options(), Serving(**serving))


def test_what_is_not_known_is_asked_for() -> None:
    with pytest.raises(
        ConfigError, match="--kv-memory-gib: required, because the size of the target's weights"
    ):
        inspect(model(TARGET, None), model(raw_config()), Options(), Serving())
    measured = model(None, None, kv=100)
    with pytest.raises(ConfigError, match="--block-size: required"):
        inspect(measured, measured, Options(), Serving(kv_memory_gib=1))
    with pytest.raises(ConfigError, match="--kv-dtype: 'float32', but of a model only"):
        inspect(
            measured, measured, Options(block_size=4), Serving(kv_memory_gib=1, kv_dtype="float32")
        )


# -- facts


@pytest.mark.parametrize(("target", "draft"), PAIRS)
def test_shipped_pairs_fit(target: str, draft: str) -> None:
    raw_target, facts = (
        look_up("target", target, offline=True),
        look_up("draft", draft, offline=True),
    )
    assert raw_target.config is not None and facts.config is not None
    geometry, config = (
        TargetGeometry.from_dict(raw_target.config),
        DraftConfig.from_dict(facts.config),
    )
    config.check_target(
        hidden_size=geometry.hidden_size,
        vocab_size=geometry.vocab_size,
        num_layers=geometry.num_hidden_layers,
    )
    assert facts.weight_bytes == draft_weight_bytes(config)


def test_every_facts_file_says_where_it_is_from() -> None:
    files = {path.name for path in (Path(cli.__file__).parent / "facts").glob("*.json")}
    known = [*shipped("target").values(), *shipped("draft").values()]
    assert files == {facts.file for facts in known} | {"collection.json"}
    for facts in known:
        assert facts.source.startswith("Read: ")
        assert (
            (facts.config is None)
            == (facts.weight_bytes is None)
            == (facts.kv_bytes_per_token is not None)
        )
        # What is not known is said, and is not in the config all the same.
        fields = {
            *(facts.config or {}),
            *(f"dflash_config.{name}" for name in (facts.config or {}).get("dflash_config", {})),
        }
        assert not fields & set(facts.unknown) and bool(facts.unknown) == (
            "Not seen: " in facts.source
        )
    assert collection().source.startswith("Read: ")


@pytest.mark.parametrize("name", PUBLISHED_GIB)
def test_published_sizes(name: str) -> None:
    """Weights computed from the geometry against the checkpoint's size: a wrong layer or width does not fit."""
    facts = shipped("draft")[f"z-lab/{name}"]
    assert facts.config is not None and facts.weight_bytes is not None
    own = {"mask_token_id": 0, **facts.config["dflash_config"]}
    assert facts.weight_bytes == draft_weight_bytes(
        DraftConfig.from_dict({**facts.config, "dflash_config": own})
    )
    assert facts.weight_bytes / GIB == pytest.approx(PUBLISHED_GIB[name], abs=0.0051)


def test_every_published_draft_has_a_size() -> None:
    assert {f"z-lab/{name}" for name in PUBLISHED_GIB} == {
        draft for pair in collection().pairs for draft in pair.drafts
    }


def test_parameters_as_others_count_them() -> None:
    assert shipped("draft")["z-lab/Qwen3.5-4B-DFlash"].weight_bytes == 2 * 634_425_856
    assert shipped("draft")["z-lab/Qwen3.6-35B-A3B-DFlash"].weight_bytes == 2 * 385_906_176


def test_qwen35_27b_in_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    """By the earlier revision of its draft, which had no sliding layers."""
    report = answer(
        capsys, "Qwen/Qwen3.5-27B", "z-lab/Qwen3.5-27B-DFlash@5-layers", "--window", "4096"
    )
    assert (
        report["target_kv_bytes_per_token"] == 64 * 1024
        and report["draft_kv_bytes_per_token"] == 20 * 1024
    )
    assert report["target_tokens_gain_ceiling"] == 0.3125
    assert (report["recurrent_layers"], report["recurrent_state_bytes"]) == (
        48,
        48 * (48 * 128 * 128 * 4 + 10240 * 3 * 2),
    )
    weights = report["target_weight_bytes"] + report["draft_weight_bytes"]
    assert report["kv_memory_bytes"] == 72 * GIB - weights - 48 * (
        report["recurrent_state_bytes"] + report["recurrent_replay_bytes"]
    )
    assert report["draft_kv_slots"] == min(
        int(DRAFT_KV_HEADROOM * 48 * (4096 + 16)), report["target_tokens_unbounded"]
    )
    # Replay against snapshots at block 16, per request: 19.8 MiB and 2.27 GiB.
    assert report["recurrent_replay_bytes"] < report["recurrent_snapshot_bytes"] / 100
    assert 0 <= report["target_tokens_gain"] < 0.3125 and report["worker"] == "sglang-dflash"


@pytest.mark.parametrize(("target", "draft"), PAIRS[:2])
def test_a_plain_name_is_the_revision_that_it_downloads(
    capsys: pytest.CaptureFixture[str], target: str, draft: str
) -> None:
    report = answer(capsys, target, draft, "--window", "4096")
    assert (
        report["draft_layers"] == "5 sliding (window 4096, causal), 1 full"
        and report["mask_token_id"] == 248077
    )
    assert (
        report["draft_kv_bytes_per_token"] == 6 * 2 * 8 * 128 * 2
        and report["worker"] == "sglang-dflash"
    )
    assert len(report["target_layer_ids"]) == 8


def test_the_peers_measured_geometry(capsys: pytest.CaptureFixture[str]) -> None:
    peer = (
        "sglang-40665/target",
        "sglang-40665/draft",
        "--window",
        "2048",
        "--max-running-requests",
        "8",
        "--block-size",
        "16",
    )
    report = answer(capsys, *peer, "--kv-memory-gib", "36.1")
    memory, slots = int(36.1 * GIB), int(DRAFT_KV_HEADROOM * 8 * (2048 + 16))
    assert report["target_tokens"] == (memory - slots * 20480) // 61030
    assert report["target_tokens_unbounded"] == memory // (61030 + 20480)
    assert report["target_tokens_gain"] >= 0.30 and report["worker"] == "unknown"


# -- the command


def test_the_demo_pair_weighs_what_its_files_hold(capsys: pytest.CaptureFixture[str]) -> None:
    pair = demo_pair("dense")
    report = answer(
        capsys, str(pair.target), str(pair.draft), "--window", "64", "--max-running-requests", "4"
    )
    with safe_open(pair.draft / "model.safetensors", framework="pt") as opened:
        tensors = [opened.get_tensor(name) for name in opened.keys()]  # noqa: SIM118 - the handle does not iterate
    assert report["draft_weight_bytes"] == sum(tensor.nbytes for tensor in tensors)
    assert report["target_weight_bytes"] == (pair.target / "model.safetensors").stat().st_size
    assert (
        report["target_kv_bytes_per_token"] == 6 * 2 * 2 * 64 * 2
        and report["draft_kv_bytes_per_token"] == 3 * 2 * 2 * 64 * 2
    )
    assert (report["worker"], report["block_size"], report["worker_reason"]) == (
        "sglang-dflash",
        8,
        None,
    )
    assert report["draft_kv_slots"] == int(DRAFT_KV_HEADROOM * 4 * (64 + 8))


def test_the_weight_index_is_preferred(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TARGET))
    assert look_up("target", str(tmp_path)).weight_bytes is None
    (tmp_path / "model-00001-of-00001.safetensors").write_bytes(b"0" * 10)
    assert look_up("target", str(tmp_path)).weight_bytes == 10
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": 8}})
    )
    assert look_up("target", str(tmp_path)).weight_bytes == 8


def test_a_pair_that_does_not_fit_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pair = demo_pair("dense")
    shutil.copytree(pair.draft, tmp_path / "draft")
    config = json.loads((tmp_path / "draft/config.json").read_text())
    (tmp_path / "draft/config.json").write_text(json.dumps({**config, "hidden_size": 256}))
    assert "hidden_size: the draft's is 256, the target's 192" in refusal(
        capsys, str(pair.target), str(tmp_path / "draft")
    )


def test_what_cannot_be_read_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    shown = refusal(capsys, "Qwen/Nonesuch", PAIRS[0][1])
    assert "TARGET: 'Qwen/Nonesuch'" in shown and all(target in shown for target, _ in PAIRS)
    assert "DRAFT: 'Qwen/Nonesuch'" in refusal(capsys, PAIRS[0][0], "Qwen/Nonesuch")
    assert "DRAFT: no config.json in" in refusal(capsys, PAIRS[0][0], str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    assert "is not valid JSON" in refusal(capsys, PAIRS[0][0], str(tmp_path))
    (tmp_path / "config.json").write_text("[]")
    assert "holds no JSON object" in refusal(capsys, PAIRS[0][0], str(tmp_path))


def test_hub_errors_name_argument_and_value(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def refuse(name: str, file: str) -> str:
        raise huggingface_hub.errors.LocalEntryNotFoundError(f"no {file} of {name}")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", refuse)
    with pytest.raises(
        ConfigError, match=r"DRAFT: 'no/such' is neither .* \(no config.json of no/such\)"
    ):
        look_up("draft", "no/such")


def test_a_hub_config_is_fetched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub

    (tmp_path / "config.json").write_text(json.dumps(TARGET))
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda name, file: str(tmp_path / file))
    facts = look_up("target", "some/target")
    assert facts.config == TARGET and facts.weight_bytes is None and "hub" in facts.source


def test_the_table_shows_every_fact(capsys: pytest.CaptureFixture[str]) -> None:
    report = answer(capsys, *PAIRS[2], "--window", "1024")
    assert cli.main(["inspect", *PAIRS[2], "--window", "1024", "--offline"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {line.split()[0] for line in lines if not line.startswith(" ")} == {
        *report,
        "source",
    } - {"sources"}
    assert max(map(len, lines)) <= 120


def test_help_imports_no_engine() -> None:
    code = (
        "import sys, contextlib, io\nfrom sglang_dflash.cli import main\n"
        "for argv in (['--help'], ['inspect', '--help']):\n"
        "    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):\n        main(argv)\n"
        "assert main(['inspect', 'Qwen/Qwen3-8B', 'z-lab/Qwen3-8B-DFlash-b16', '--offline']) == 0\n"
        "assert not {'torch', 'sglang', 'transformers', 'huggingface_hub'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
