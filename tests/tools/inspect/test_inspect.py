"""Findings of `sglang-dflash inspect` on a pair, their printed form, and its refusals."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from sglang_dflash.checkpoint.draft_config import DraftConfig, LayerGroup, Reach
from sglang_dflash.checkpoint.published import ModelFacts, published_pairs
from sglang_dflash.common.errors import ConfigError
from sglang_dflash.drafting.options import Options
from sglang_dflash.memory.sizes import GroupKVSize, draft_weight_bytes
from sglang_dflash.tools.demo_pairs.pairs import demo_pair
from sglang_dflash.tools.inspect.kv import GIB, split_kv
from sglang_dflash.tools.inspect.report import inspect
from sglang_dflash.tools.inspect.serving import Serving
from sglang_dflash.tools.inspect.table import as_table
from tests.checkpoint.target_fields import GDN, TARGET
from tests.commands import ROOT
from tests.conftest import raw_config, with_own
from tests.errors import refused
from tests.tools.inspect.pairs import PAIR, SERVING, facts, found_of, inspected, refusal

HYBRID = {**TARGET, "full_attention_interval": 2, **GDN}
OTHER_HEAD = raw_config(projector_type="domino")


# -- facts ---------------------------------------------------------------------------------------


def test_the_demo_pair_weighs_what_its_files_hold(capsys: pytest.CaptureFixture[str]) -> None:
    pair = demo_pair("dense")
    flags = ["--window", "64", "--max-running-requests", "4"]
    report = inspected(capsys, str(pair.target), str(pair.draft), *flags)
    with safe_open(pair.draft / "model.safetensors", framework="pt") as opened:
        tensors = [opened.get_tensor(name) for name in opened.keys()]  # noqa: SIM118 - not iterable
    assert report["draft_weight_bytes"] == sum(tensor.nbytes for tensor in tensors)
    assert report["target_weight_bytes"] == (pair.target / "model.safetensors").stat().st_size
    assert report["target_kv_bytes_per_token"] == 6 * 2 * 2 * 64 * 2
    assert report["draft_kv_bytes_per_token"] == 3 * 2 * 2 * 64 * 2
    assert (report["worker"], report["worker_reason"]) == ("sglang-dflash", None)
    assert report["block_size"] == 8
    assert report["draft_kv_groups"][0]["entries"] == (4 + 1) * (64 + 8)


DESCRIBED = {
    "draft_kind": "DFlash",
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


def test_both_configs_are_described() -> None:
    layers = {"layer_types": ["sliding_attention"] * 2 + ["full_attention"], "sliding_window": 8}
    scaling = {"rope_type": "yarn", "factor": 4.0}
    draft = raw_config(**layers, rope_scaling=scaling, dtype="bfloat16")
    target = {
        **TARGET,
        "architectures": ["Qwen3ForCausalLM"],
        "torch_dtype": "float16",
        "max_position_embeddings": 512,
    }
    found = found_of(target, draft)
    assert {name: found[name] for name in DESCRIBED} == DESCRIBED
    for change, words in [
        ({"is_causal": False}, "2 sliding (window 8), 1 full"),
        ({"is_causal": True, "layer_types": ["full_attention"] * 3}, "3 full (causal)"),
        ({"projector_type": "domino"}, "2 sliding (window 8), 1 full"),
    ]:
        assert found_of(target, {**draft, **change})["draft_layers"] == words
    own = with_own(selector_rank=256, selector_top_k=16, conv_kernel_size=2, conv_group_size=8)
    assert found_of(target, {**draft, **own})["draft_kind"] == (
        "DFlash2: selector of rank 256 over 16 candidates, convolution of 2 taps"
    )


@pytest.mark.parametrize(
    ("target", "draft", "worker", "rollback"),
    [
        (TARGET, raw_config(), "sglang-dflash", None),
        (TARGET, OTHER_HEAD, "builtin", None),
        (HYBRID, raw_config(), "sglang-dflash", "replay"),
        # Of an unknown shape.
        ({**TARGET, "full_attention_interval": 2}, raw_config(), "sglang-dflash", "snapshot"),
        (HYBRID, OTHER_HEAD, "builtin", "snapshot"),
        ({**TARGET, "quantization_config": {"lm_head": True}}, raw_config(), "sglang-dflash", None),
    ],
)
def test_the_worker_and_its_rollback(
    target: dict[str, Any], draft: dict[str, Any], worker: str, rollback: str | None
) -> None:
    found = found_of(target, draft)
    assert (found["worker"], found["recurrent_rollback"]) == (worker, rollback)
    assert (found["worker_reason"] is None) == (worker == "sglang-dflash")
    assert found["draft_kv_bytes_per_token"] == 3 * 2 * 2 * 16 * 2
    windowed = found_of(target, draft, Options(verify_block=6, window=100, sinks=4))
    assert (found["block_size"], found["window"], found["sinks"]) == (4, None, 0)
    assert (windowed["block_size"], windowed["window"], windowed["sinks"]) == (6, 100, 4)


def test_what_was_not_seen_decides_nothing() -> None:
    raw = raw_config(dflash_config={"target_layer_ids": [1, 3]})
    partly = ModelFacts("a draft", raw, 0, "a test", unknown=("dflash_config.mask_token_id",))
    found = inspect(facts(TARGET), partly, Options(), SERVING)
    assert found["worker"] == "unknown"
    assert "dflash_config.mask_token_id" in found["worker_reason"]
    assert (found["mask_token_id"], found["draft_layers"]) == (None, "3 full")
    with pytest.raises(ConfigError) as error:
        inspect(facts({**TARGET, "vocab_size": 65}), partly, Options(), SERVING)
    assert "vocab_size" in str(error.value)


# -- memory --------------------------------------------------------------------------------------


def test_draft_weights_by_hand() -> None:
    attention = 32 * 64 + 2 * 32 * 32 + 64 * 32
    layer = attention + 3 * 32 * 48 + 2 * 32 + 2 * 16
    of_config = DraftConfig.from_dict(raw_config())
    assert draft_weight_bytes(of_config) == 2 * (2 * 32 * 32 + 3 * layer + 2 * 32)
    biased = DraftConfig.from_dict(raw_config(attention_bias=True))
    biases = 3 * (64 + 32 + 32 + 32)
    assert draft_weight_bytes(biased) == draft_weight_bytes(of_config) + 2 * biases


def test_rings_leave_the_rest_to_the_target() -> None:
    """30 entries of 20 bytes and tags of 5; of each target token, one of 4."""

    def split_of(*groups: GroupKVSize) -> dict[str, Any]:
        return split_kv(12_000, 100, [(LayerGroup(Reach(), (), ()), kv) for kv in groups])

    split = split_of(GroupKVSize(20, 30))
    assert split.pop("draft_kv_groups")[0]["entries"] == 30
    assert split == {
        "draft_kv_bytes": 30 * 25 + 4 * 108,
        "target_tokens": 108,
        "target_tokens_gain_ceiling": 0.2,
    }
    for ring in (None, 100, 5000):
        whole = split_of(GroupKVSize(20, ring))
        assert whole["target_tokens"] == 100
        assert whole["draft_kv_bytes"] == 2000
    mixed = split_of(GroupKVSize(15, 30), GroupKVSize(5, None))
    assert mixed["target_tokens"] == (12_000 - 30 * 20) // (100 + 5 + 4)


def test_sliding_layers_gain_without_a_window() -> None:
    """Tokens that they cannot see are not kept; a full layer beside them keeps all."""
    kinds = ["sliding_attention", "sliding_attention", "full_attention"]
    draft = raw_config(layer_types=kinds, sliding_window=100)
    serving = Serving(max_running_requests=3, kv_memory_gib=1.0)
    found = found_of(TARGET, draft, serving=serving)
    tokens = found["target_tokens"]
    sliding, full = found["draft_kv_groups"]
    assert sliding == {
        "layers": [0, 1], "window": 100, "entries": (3 + 1) * (100 + 4), "ring": True,
        "bytes": 416 * (2 * 128 + 5) + 4 * tokens,
    }  # fmt: skip
    assert full == {
        "layers": [2], "window": None, "entries": tokens, "ring": False, "bytes": 128 * tokens,
    }  # fmt: skip
    assert found["draft_kv_bytes"] == sliding["bytes"] + full["bytes"]
    taken = found["draft_kv_bytes"] + tokens * found["target_kv_bytes_per_token"]
    assert GIB - 1000 < taken <= GIB
    assert found["target_tokens_builtin"] == GIB // (3 * 128 + found["target_kv_bytes_per_token"])
    assert found["target_tokens_gain"] == tokens / found["target_tokens_builtin"] - 1
    assert "2 of 3 draft layers have a window, and keep only" in found["verdict"]
    assert "a ring of 416 entries" in " ".join(as_table(found).split())


def test_memory_is_what_weights_and_states_leave() -> None:
    serving = Serving(max_running_requests=10, memory_gib=4, mem_fraction=0.5)
    found = inspect(facts(HYBRID, GIB), facts(raw_config()), Options(), serving)
    state = 3 * (3 * 7 * 5 * 4 + (2 * 2 * 5 + 3 * 7) * 3 * 2)
    # Block 4: 4 + 4 - 2 inputs of a convolution of width 4, 3 before them, and two gates of 3 heads
    # per token.
    replay = 3 * ((2 * 2 * 5 + 3 * 7) * (6 + 3) + 2 * 4 * 3) * 2
    assert (found["recurrent_state_bytes"], found["recurrent_replay_bytes"]) == (state, replay)
    assert found["recurrent_snapshot_bytes"] == 3 * (4 * 3 * 7 * 5 * 4 + 41 * 6 * 2)
    draft = draft_weight_bytes(DraftConfig.from_dict(raw_config()))
    steps = found["draft_step_bytes"]
    # Logits and activations of 10 requests and 4 positions, and more.
    assert steps is not None and steps > 10 * (3 * 64 + 4 * 3 * 32) * 2
    left = GIB - draft - steps - 11 * replay
    states = (found["recurrent_slots"] + 1) * state
    # Without a draft its weights, its steps and what replay keeps are free, too.
    assert found["target_tokens_without_draft"] == pytest.approx(
        (GIB - GIB * 0.9 / 1.9) / found["target_kv_bytes_per_token"], rel=1e-3
    )
    assert found["kv_memory_bytes"] == left - states
    # Five of each request, and one of each session that the K/V holds beside.
    sessions = found["target_tokens"] // raw_config()["max_position_embeddings"]
    assert found["recurrent_slots"] == 5 * 10 + sessions - 10 > 5 * 10
    assert found["running_requests"] == 10 and found["recurrent_layers"] == 3


def test_options_size_the_cache_and_dtypes_its_entries() -> None:
    fp8 = {"kv_memory_gib": 1.0, "kv_dtype": "fp8_e4m3"}
    serving = Serving(max_running_requests=3, draft_kv_dtype="float32", **fp8)  # type: ignore[arg-type]
    found = found_of(TARGET, raw_config(), Options(window=100, sinks=4), serving)
    (group,) = found["draft_kv_groups"]
    assert group["entries"] == (3 + 1) * (100 + 4 + 4)
    assert found["target_kv_bytes_per_token"] == 6 * 2 * 2 * 16
    assert found["draft_kv_bytes_per_token"] == 3 * 2 * 2 * 16 * 4
    chosen = found_of(TARGET, raw_config(), Options(window=100, draft_kv_tokens=7), serving)
    assert chosen["draft_kv_groups"][0]["entries"] == 7
    inherited = found_of(TARGET, raw_config(), serving=Serving(**fp8))  # type: ignore[arg-type]
    assert inherited["draft_kv_bytes_per_token"] == 3 * 2 * 2 * 16


@pytest.mark.parametrize(
    ("field", "value", "serving"),
    [
        ("max_running_requests", 0, {"max_running_requests": 0}),
        ("mem_fraction", 1.5, {"mem_fraction": 1.5}),
        ("memory_gib", -1.0, {"memory_gib": -1.0}),
        ("memory_gib", 1e300, {"memory_gib": 1e300}),
        ("kv_memory_gib", 1e300, {"kv_memory_gib": 1e300}),
        ("max_running_requests", 10**400, {"max_running_requests": 10**400}),
        ("kv_memory_gib", 0.0, {"kv_memory_gib": 0.0}),
        ("kv_dtype", "int3", {"kv_dtype": "int3"}),
        ("draft_kv_dtype", "int3", {"draft_kv_dtype": "int3"}),
        # Too little for one token, and for the weights.
        ("kv_memory_gib", int(1e-8 * GIB) / GIB, {"kv_memory_gib": 1e-8}),
        ("memory_gib", 1.0, {"memory_gib": 1.0}),
    ],
)
def test_serving_is_checked(field: str, value: object, serving: dict[str, Any]) -> None:
    with refused(field, value):
        inspect(facts(TARGET, GIB), facts(raw_config()), Options(), Serving(**serving))


def test_what_is_not_known_is_asked_for() -> None:
    no_block = {name: value for name, value in OTHER_HEAD.items() if name != "block_size"}
    for target, draft, serving, field in [
        (facts(TARGET, None), facts(raw_config()), Serving(), "kv_memory_gib"),
        (facts(TARGET), facts(no_block), SERVING, "verify_block"),
    ]:
        with refused(field) as error:
            inspect(target, draft, Options(), serving)
        # A value that was not given is not shown.
        assert str(error.value).startswith(f"{field}: required, because")


# -- text ----------------------------------------------------------------------------------------


def test_the_table_shows_the_verdict_what_is_known_and_the_warnings() -> None:
    target = {**TARGET, "max_position_embeddings": 8192}
    report = found_of(target, raw_config(), Options(verify_block=5, window=9000))
    head, compared, _, *groups = as_table(report, sources=True).split("\n\n")
    assert " ".join(head.split()) == report["verdict"]
    heads, tokens, running = compared.splitlines()
    assert re.split("  +", heads.strip()) == ["sglang-dflash", "SGLang's worker", "without a draft"]
    suffixes = ("", "_builtin", "_without_draft")
    for line, name in ((tokens, "target_tokens"), (running, "running_requests")):
        shown = [int(figure.replace(",", "")) for figure in re.findall(r" ([\d,]+)", line)]
        assert shown == [report[name + suffix] for suffix in suffixes]
    lines = [line for group in groups for line in group.splitlines() if line.startswith("  ")]
    elsewhere = {"verdict", "assumptions", "warnings", "sources"}
    elsewhere |= {name for name in report if name.startswith("target_tokens")}
    elsewhere |= {f"running_requests{suffix}" for suffix in suffixes[1:]}
    known = [name for name, value in report.items() if value not in (None, 0, "", [])]
    assert len([line for line in lines if line[2] != " "]) == len(set(known) - elsewhere)
    text = " ".join(as_table(report).split())
    assert len(report["warnings"]) == 3
    assert all(f"warning: {warning}" in text for warning in report["warnings"])


def test_the_verdict_names_the_gain_or_the_reason() -> None:
    # 384 of 768 + 384 bytes of a token are the draft's.
    gain = "--window bounds it, for up to 50.0 % more KV tokens"
    many = Serving(kv_memory_gib=1, max_running_requests=10_000)
    for found, words in [
        (found_of(TARGET, raw_config(), Options(window=10**8), many), "frees nothing"),
        (found_of(TARGET, raw_config()), gain),
        (found_of(TARGET, OTHER_HEAD), "because of projector_type"),
    ]:
        assert words in found["verdict"]


def test_the_docs_explain_every_fact() -> None:
    page = (ROOT / "docs/inspect.md").read_text()
    table = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    names = sorted(re.findall(r"`(\w+)`", " ".join(table)))
    # The command adds what would fit.
    assert names == sorted([*found_of(TARGET, raw_config()), "suggestions"])


# -- the command ---------------------------------------------------------------------------------


def test_errors_name_the_commands_own_flags(capsys: pytest.CaptureFixture[str]) -> None:
    assert "sglang-dflash: --window: 3; " in refusal(capsys, *PAIR, "--window", "3")
    shown = refusal(capsys, *PAIR, "--memory-gib", "1")
    assert "sglang-dflash: --memory-gib: 1.0; with --mem-fraction 0.9, " in shown
    assert "the weights alone do not fit: give --tp-size 32, or more memory" in shown


def test_names_are_found_in_any_case_and_near_ones_are_suggested(
    capsys: pytest.CaptureFixture[str],
) -> None:
    target, draft = PAIR
    report = inspected(capsys, target.upper(), draft.lower())
    assert (report["target"], report["draft"]) == (target, draft)
    for name in ("Qwen3-8B", "Qwen/Qwen3-8b-", "qwen/qwen-3-8b", "Qwen3-8"):
        shown = refusal(capsys, name, draft)
        assert "did you mean 'Qwen/Qwen3-8B'" in shown and "gpt-oss" not in shown
    # Another checkpoint, and no slip.
    for name in ("Qwen/Qwen3-8B-FP8", "me/qwen3-8b-awq"):
        shown = refusal(capsys, name, draft)
        assert "did you mean" not in shown and "no facts of it are shipped" in shown
        in_8_bits = "or Qwen/Qwen3-8B with --quantization fp8"
        assert (in_8_bits in shown) == name.endswith("-FP8")
    shown = refusal(capsys, "Qwen/Nonesuch", draft)
    assert "'Qwen/Nonesuch'" in shown and "did you mean" not in shown
    assert all(known in shown for known in published_pairs())


def test_what_cannot_be_read_and_a_swapped_pair_are_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    target, draft = PAIR
    for text in (None, "{", "[]"):
        if text is not None:
            (tmp_path / "config.json").write_text(text)
        assert str(tmp_path) in refusal(capsys, target, str(tmp_path))
    pair = demo_pair("dense")
    swapped = "this is a draft: give it as DRAFT, and the target here"
    for first, second, words in [
        (draft, target, swapped),
        (str(pair.draft), str(pair.target), swapped),
        (target, target, "this is a target: give it as TARGET, and the draft here"),
        (str(pair.target), str(pair.target), "no DFlash draft"),
    ]:
        assert words in refusal(capsys, first, second)


def test_help_and_inspect_import_no_engine() -> None:
    pair = demo_pair("dense")
    code = (
        "import sys, contextlib, io\n"
        "from sglang_dflash.tools.cli import main\n"
        "for argv in (['--help'], ['inspect', '--help']):\n"
        "    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):\n"
        "        main(argv)\n"
        "pair = ['Qwen/Qwen3-8B', 'z-lab/Qwen3-8B-DFlash-b16']\n"
        "assert main(['inspect', *pair, '--offline']) == 0\n"
        f"assert main(['inspect', {str(pair.target)!r}, {str(pair.draft)!r}, '--json']) == 0\n"
        "assert not {'torch', 'sglang', 'transformers', 'huggingface_hub'} & set(sys.modules)"
    )
    shown = subprocess.run(
        [sys.executable, "-c", code], check=True, stdout=subprocess.PIPE, text=True
    )
    assert json.loads(shown.stdout.splitlines()[-1])["worker"] == "sglang-dflash"


def test_a_block_above_the_trained_one_is_for_lookup(capsys: pytest.CaptureFixture[str]) -> None:
    """Without lookup it is warned of; with it, the draft's logits stay those of its own block."""
    pair = ("Qwen/Qwen3.5-27B", "z-lab/Qwen3.5-27B-DFlash")
    asked = (*pair, "--max-running-requests", "8", "--block-size", "32")
    plain, looked = inspected(capsys, *asked), inspected(capsys, *asked, "--lookup")
    own = inspected(capsys, *asked[:-1], "16")
    assert [found["block_size"] for found in (own, plain, looked)] == [16, 32, 32]
    assert any("trained with" in warning for warning in plain["warnings"])
    assert not any("trained with" in warning for warning in looked["warnings"])
    texts = 4 * 9 * looked["draft_context"]
    assert own["draft_step_bytes"] + texts < looked["draft_step_bytes"]
    assert looked["draft_step_bytes"] - texts < plain["draft_step_bytes"]
