"""The shipped facts: their sources, the sizes that follow from them, and published pairs in
numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sglang_dflash.checkpoint.draft_config import DraftConfig
from sglang_dflash.checkpoint.published import published, published_pairs, shipped
from sglang_dflash.drafting.options import Options
from sglang_dflash.memory.sizes import draft_weight_bytes
from sglang_dflash.tools.demo_pairs.pairs import demo_pair
from sglang_dflash.tools.inspect.kv import GIB
from sglang_dflash.tools.inspect.pair import other_target
from sglang_dflash.tools.inspect.report import inspect
from sglang_dflash.tools.inspect.serving import Serving
from tests.tools.inspect.pairs import inspected, refusal

# GiB of the published checkpoints, as listed publicly.
PUBLISHED_GIB = {
    "Kimi-K2.5-DFlash": 6.48,
    "Qwen3.5-4B-DFlash": 1.18,
    "Qwen3.5-9B-DFlash": 2.41,
    "Qwen3.5-27B-DFlash": 3.96,
    "Qwen3.5-35B-A3B-DFlash": 0.72,
    "Qwen3.5-122B-A10B-DFlash": 1.44,
    "Qwen3.6-27B-DFlash": 3.22,
    "Qwen3.6-35B-A3B-DFlash": 0.72,
    "gpt-oss-20b-DFlash": 1.46,
    "gpt-oss-120b-DFlash": 1.46,
    "Qwen3-Coder-Next-DFlash": 0.88,
    "Qwen3-Coder-30B-A3B-DFlash": 0.88,
    "Qwen3-4B-DFlash-b16": 1.00,
    "Qwen3-8B-DFlash-b16": 1.95,
    "LLaMA3.1-8B-Instruct-DFlash-UltraChat": 1.95,
    "Qwen3.5-27B-DFlash@5-layers": 3.22,
    "Qwen3.5-35B-A3B-DFlash@8-layers": 0.884,
    "jetspec-Qwen3.6-35B-A3B": 0.883,
    "Qwen3.8-27B-DFlash2": 2 * 1.924e9 / GIB,
    # No source shows it.
    "Muse-Glimmer-30B-DFlash2": None,
}

DRAFTS = [draft for drafts in published_pairs().values() for draft in drafts]


def test_all_facts_give_their_source() -> None:
    assert published()["pairs_source"].startswith("Read: ")
    for facts in (*shipped("target").values(), *shipped("draft").values()):
        assert facts.source.startswith("Read: ") and facts.weight_bytes is not None
        # The source lists the unknown fields, and the config does not hold them.
        own = facts.config.get("dflash_config", {})
        fields = {*facts.config, *(f"dflash_config.{name}" for name in own)}
        assert not fields & set(facts.unknown)
        assert bool(facts.unknown) == ("Not seen: " in facts.source)


@pytest.mark.parametrize("name", DRAFTS)
def test_published_sizes(name: str) -> None:
    """Weights computed from the geometry have the checkpoint's size. A wrong layer or width does
    not."""
    facts = shipped("draft")[name]
    assert facts.weight_bytes is not None
    own = {"mask_token_id": 0, **facts.config["dflash_config"]}
    config = DraftConfig.from_dict({**facts.config, "dflash_config": own})
    assert facts.weight_bytes == draft_weight_bytes(config)
    published = PUBLISHED_GIB[name.partition("/")[2]]
    assert published is None or facts.weight_bytes / GIB == pytest.approx(published, abs=0.0051)


def test_qwen35_27b_in_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    """The draft is its earlier revision, which had no sliding layers."""
    report = inspected(
        capsys, "Qwen/Qwen3.5-27B", "z-lab/Qwen3.5-27B-DFlash@5-layers", "--window", "4096"
    )
    assert report["target_kv_bytes_per_token"] == 64 * 1024
    assert report["draft_kv_bytes_per_token"] == 20 * 1024
    assert report["target_tokens_gain_ceiling"] == 0.3125
    assert report["recurrent_layers"] == 48
    assert report["recurrent_state_bytes"] == 48 * (48 * 128 * 128 * 4 + 10240 * 3 * 2)
    weights = report["target_weight_bytes"] + report["draft_weight_bytes"]
    step = report["draft_step_bytes"]
    left = 72 * GIB - weights - step - 49 * report["recurrent_replay_bytes"]
    states = (report["recurrent_slots"] + 1) * report["recurrent_state_bytes"]
    assert report["kv_memory_bytes"] == left - states
    # SGLang gives 0.9 / 1.9 of what draft steps have not taken to states, and 5 of them to a
    # request. Here no more than those 10 need, for K/V holds no more sessions of 32,768 tokens.
    assert (left + step) * 0.9 / 1.9 > states == 51 * report["recurrent_state_bytes"]
    assert report["running_requests"] == report["recurrent_slots"] // 5 == 10
    assert report["running_requests_builtin"] == 1
    assert any("48: 10 run at a time with this worker" in warning for warning in report["warnings"])
    # Most of it are logits: 15 drafts of 48 requests over 248,320 tokens.
    assert 48 * 15 * 248_320 * 2 < step < 0.6 * GIB
    (group,) = report["draft_kv_groups"]
    # A ring for the 10 that run, not for 48.
    assert group["ring"] and group["entries"] == (10 + 1) * (4096 + 16)
    # Replay against snapshots at block 16, per request: 19.8 MiB and 2.27 GiB.
    assert report["recurrent_replay_bytes"] < report["recurrent_snapshot_bytes"] / 100
    assert report["worker"] == "sglang-dflash"


# GB of weights by the billions of parameters as publishers or others count them, of 2 bytes each
# (model cards, ollama, a public test), or of the quantized checkpoint; and how exact that is.
PUBLISHED_GB = {
    "Qwen/Qwen3.5-4B": (2 * (4.2058 + 0.3335), 0.01),
    "Qwen/Qwen3.5-9B": (2 * (9.6531 - 0.2433), 0.01),  # without the MTP layer
    "Qwen/Qwen3-Coder-Next": (2 * 79.67, 0.01),
    "Qwen/Qwen3-Coder-30B-A3B-Instruct": (2 * 30.53, 0.01),
    "meta-llama/Llama-3.1-8B-Instruct": (2 * 8.03, 0.01),
    "Qwen/Qwen3.5-122B-A10B": (2 * 122.56, 0.01),
    "openai/gpt-oss-20b": (12.8 * GIB / 1e9, 0.053),
    "openai/gpt-oss-120b": (60.8 * GIB / 1e9, 0.053),
}


@pytest.mark.parametrize("name", PUBLISHED_GB)
def test_target_weights_as_others_count_them(name: str) -> None:
    weights, (published, exact) = shipped("target")[name].weight_bytes, PUBLISHED_GB[name]
    assert weights is not None and weights / 1e9 == pytest.approx(published, abs=exact)


@pytest.mark.parametrize("target", published_pairs())
def test_facts_of_every_target_of_the_collection_are_shipped(
    capsys: pytest.CaptureFixture[str], target: str
) -> None:
    for draft in published_pairs()[target]:
        found = inspected(capsys, target, draft, "--window", "512", "--memory-gib", "1000")
        seen = not shipped("draft")[draft].unknown
        assert found["worker"] == ("sglang-dflash" if seen else "unknown")
        assert found["target_tokens_gain"] > 0


@pytest.mark.parametrize("size", ["27B", "35B-A3B"])
def test_a_plain_name_is_the_revision_that_it_downloads(
    capsys: pytest.CaptureFixture[str], size: str
) -> None:
    pair = [f"Qwen/Qwen3.5-{size}", f"z-lab/Qwen3.5-{size}-DFlash"]
    report = inspected(capsys, *pair, "--window", "4096")
    assert report["draft_layers"] == "5 sliding (window 4096, causal), 1 full"
    assert report["mask_token_id"] == 248077
    assert report["draft_kv_bytes_per_token"] == 6 * 2 * 8 * 128 * 2
    assert report["worker"] == "sglang-dflash"
    assert len(report["target_layer_ids"]) == 8


def test_the_mark_of_the_peer_without_a_flag() -> None:
    """SGLang's pull request 40665 measured Qwen3.8-27B with a draft of five sliding layers, window
    2048, 8 requests: 450,060 target tokens with a draft entry per slot (8.6 GiB of draft KV beside
    27.5 GiB), 547,899 with its flag (+21.7 %). The configs are made of these sizes."""
    target = shipped("target")["Qwen/Qwen3.6-27B"]
    draft = shipped("draft")["z-lab/Qwen3.6-27B-DFlash"]
    sliding = {**draft.config, "layer_types": ["sliding_attention"] * 5, "sliding_window": 2048}
    serving = Serving(max_running_requests=8, kv_memory_gib=8.6 + 27.5)
    found = inspect(target, replace(draft, config=sliding), Options(), serving)
    assert (found["target_kv_bytes_per_token"], found["draft_kv_bytes_per_token"]) == (65536, 20480)
    assert found["target_tokens_builtin"] == pytest.approx(450_060, rel=0.01)
    assert found["draft_kv_bytes"] < 0.7 * GIB
    # By entries over what running requests can see; the default has one request more
    # (docs/how-it-works.md).
    gains = []
    for times in (1, 2, 4, 8):
        options = Options(draft_kv_tokens=times * 8 * (2048 + 16))
        sized = inspect(target, replace(draft, config=sliding), options, serving)
        gains.append(round(100 * (sized["target_tokens"] / 450_060 - 1), 1))
    assert gains == [30.3, 29.1, 26.8, 22.2]
    assert found["target_tokens"] == pytest.approx(1.301 * 450_060, rel=0.001)


def test_without_a_draft_it_is_the_published_one(capsys: pytest.CaptureFixture[str]) -> None:
    name, draft = "qwen/qwen3.5-4b", published_pairs()["Qwen/Qwen3.5-4B"][0]
    assert inspected(capsys, name) == inspected(capsys, name, draft)
    error = refusal(capsys, str(demo_pair("dense").target))
    assert error.startswith("sglang-dflash: DRAFT: give a folder or a hub name")


@pytest.mark.parametrize(
    ("target", "draft", "warned"),
    [
        ("Qwen/Qwen3.6-27B", "z-lab/Qwen3.5-27B-DFlash", True),
        ("qwen/qwen3.5-27b", "z-lab/Qwen3.5-27B-DFlash", False),
        ("Qwen/Qwen3.5-27B", "somebody/else", False),
        # A draft that `published_draft` finds for such a name.
        ("models/Qwen3.8-27B-NVFP4/", "z-lab/Qwen3.8-27B-DFlash2", False),
        ("models/Qwen3.6-27B-FP8", "z-lab/Qwen3.8-27B-DFlash2", True),
    ],
)
def test_a_draft_for_another_target_gives_a_warning(target: str, draft: str, warned: bool) -> None:
    assert bool(other_target(target, draft)) == warned
