"""What the report tells of a pair, and which worker it names."""

from __future__ import annotations

import pytest

from sglang_dflash.checkpoint.errors import ConfigError
from sglang_dflash.checkpoint.published import ModelFacts
from sglang_dflash.core.options import Options
from sglang_dflash.inspect_pair.memory import Serving
from sglang_dflash.inspect_pair.report import inspect
from tests.checkpoint.target_fields import GDN, TARGET
from tests.conftest import raw_config
from tests.inspect_pair.pairs import facts

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
    reason = "not seen of the draft's config.json: dflash_config.mask_token_id"
    assert (found.worker, found.worker_reason) == ("unknown", reason)
    assert found.report()["mask_token_id"] is None and found.report()["draft_layers"] == "3 full"
    with pytest.raises(ConfigError, match="vocab_size: the draft's is 64, the target's 65"):
        inspect(facts({**TARGET, "vocab_size": 65}), partly, Options(), SERVING)


def test_a_draft_for_the_builtin_worker_is_no_error() -> None:
    draft = facts(raw_config(selector_rank=256))
    found = inspect(facts(TARGET), draft, Options(), SERVING)
    assert found.worker == "builtin" and str(found.worker_reason).startswith("selector_rank: 256")
    assert found.draft_kv_bytes_per_token == 3 * 2 * 2 * 16 * 2 and found.block_size == 4
