"""What the report tells of a pair, and which worker it names."""

from __future__ import annotations

import re

import pytest

from sglang_dflash.drafting.options import Options
from sglang_dflash.facts.errors import ConfigError
from sglang_dflash.facts.published import ModelFacts
from sglang_dflash.inspect.memory import Serving
from sglang_dflash.inspect.report import as_table, inspect
from sglang_dflash.inspect.verdict import assumptions, other_target
from tests.commands import ROOT
from tests.conftest import raw_config
from tests.facts.target_fields import GDN, TARGET
from tests.inspect.pairs import facts

SERVING = Serving(kv_memory_gib=1)
DESCRIBED = {
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
ALL_FULL = {"layer_types": ["full_attention"] * 3}


def test_the_report_describes_both_configs() -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0}
    layers = {"layer_types": ["sliding_attention"] * 2 + ["full_attention"], "sliding_window": 8}
    draft = raw_config(**layers, rope_scaling=scaling, dtype="bfloat16")
    target = {
        **TARGET,
        "architectures": ["Qwen3ForCausalLM"],
        "torch_dtype": "float16",
        "max_position_embeddings": 512,
    }
    report = inspect(facts(target), facts(draft), Options(), SERVING).report()
    assert {name: report[name] for name in DESCRIBED} == DESCRIBED
    for change, words in [
        ({"is_causal": False}, "2 sliding (window 8), 1 full"),
        ({"is_causal": True, **ALL_FULL}, "3 full (causal)"),
        ({"selector_rank": 256}, "2 sliding (window 8), 1 full"),
    ]:
        changed = facts({**draft, **change})
        report = inspect(facts(target), changed, Options(), SERVING).report()
        assert report["draft_layers"] == words


def test_a_hybrid_target_has_a_rollback() -> None:
    hybrid = {**TARGET, "full_attention_interval": 2}
    for target, draft, rollback in [
        ({**hybrid, **GDN}, raw_config(), "replay"),
        (hybrid, raw_config(), "snapshot"),
        ({**hybrid, **GDN}, raw_config(selector_rank=256), "snapshot"),
    ]:
        report = inspect(facts(target), facts(draft), Options(), SERVING).report()
        assert report["recurrent_rollback"] == rollback
        assert report["target_layers"] == "3 recurrent, 3 attention"


def test_a_quantized_head_goes_to_the_builtin_worker() -> None:
    for lm_head, worker in ((True, "builtin"), (False, "sglang-dflash")):
        target = {**TARGET, "quantization_config": {"quant_method": "gptq", "lm_head": lm_head}}
        assert inspect(facts(target), facts(raw_config()), Options(), SERVING).worker == worker


def test_what_was_not_seen_decides_nothing() -> None:
    raw = raw_config(dflash_config={"target_layer_ids": [1, 3]})
    partly = ModelFacts("a draft", raw, 0, None, "a test", unknown=("dflash_config.mask_token_id",))
    found = inspect(facts(TARGET), partly, Options(), SERVING)
    reason = "no source shows dflash_config.mask_token_id of the draft's config.json"
    assert (found.worker, found.worker_reason) == ("unknown", reason)
    assert found.report()["mask_token_id"] is None and found.report()["draft_layers"] == "3 full"
    with pytest.raises(ConfigError, match="vocab_size: the draft's is 64, the target's 65"):
        inspect(facts({**TARGET, "vocab_size": 65}), partly, Options(), SERVING)


def test_a_draft_for_the_builtin_worker_is_no_error() -> None:
    draft = facts(raw_config(selector_rank=256))
    found = inspect(facts(TARGET), draft, Options(), SERVING)
    assert found.worker == "builtin" and str(found.worker_reason).startswith("selector_rank: 256")
    assert found.draft_kv_bytes_per_token == 3 * 2 * 2 * 16 * 2 and found.block_size == 4


def test_the_docs_explain_every_fact() -> None:
    report = inspect(facts(TARGET), facts(raw_config()), Options(), SERVING).report()
    page = (ROOT / "docs/inspect.md").read_text()
    table = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    assert sorted(re.findall(r"`(\w+)`", " ".join(table))) == sorted(report)


def test_the_report_says_what_it_assumes() -> None:
    default = inspect(facts({**TARGET}), facts(raw_config()), Options(), Serving(kv_memory_gib=2))
    assert "2 GiB for both KV pools (--kv-memory-gib), 48 running requests" in default.assumptions
    shown = as_table(default.report())
    assert default.assumptions.split(",")[0] in shown and "warning" not in shown
    words = assumptions(Serving(memory_gib=40, mem_fraction=0.75, kv_dtype="fp8_e4m3"))
    assert "40 GiB x 0.75 of device memory" in words and "fp8_e4m3 KV" in words


def test_sizes_that_are_hardly_meant_give_a_warning() -> None:
    target = {**TARGET, "max_position_embeddings": 8192}
    found = inspect(facts(target), facts(raw_config()), Options(block_size=5, window=9000), SERVING)
    block, window, context = found.warnings
    assert "5 is more than the 4 of a block" in block
    assert "9000 is the whole of a context of 8192 tokens" in window
    assert "contexts of 8192 tokens, the draft was made for 4096" in context
    shown = " ".join(as_table(found.report()).split())
    assert all(f"warning: {text}" in shown for text in found.warnings)


@pytest.mark.parametrize(
    ("target", "draft", "warned"),
    [
        ("Qwen/Qwen3.6-27B", "z-lab/Qwen3.5-27B-DFlash", True),
        ("qwen/qwen3.5-27b", "z-lab/Qwen3.5-27B-DFlash", False),
        ("Qwen/Qwen3.5-27B", "somebody/else", False),
    ],
)
def test_a_draft_for_another_target_gives_a_warning(target: str, draft: str, warned: bool) -> None:
    warning = other_target(target, draft)
    assert (warning is not None) == warned
    if warning:
        assert "is published for Qwen/Qwen3.5-27B, not for Qwen/Qwen3.6-27B" in warning
