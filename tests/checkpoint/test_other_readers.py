"""The configs of drafts that we write, as other engines read them: SGLang's built-in worker, vLLM
and z-lab's loop get a config from Transformers, and not the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.models.dflash import _get_dflash_layer_attention_params
from sglang.srt.speculative.dflash_utils import parse_dflash_draft_config
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM, PretrainedConfig

from launch.draft_training.start import dflash2_config, draft_config
from sglang_dflash.checkpoint.draft_config import DraftConfig
from tests import ROOT


class Tokenizer:
    """The part of a tokenizer that the recipe reads: a token is left over."""

    def __len__(self) -> int:
        return 95


def by_the_recipe() -> dict[str, Any]:
    of = LlamaConfig(
        vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=9,
        num_attention_heads=4, num_key_value_heads=2, rope_theta=1e5,
    )  # type: ignore[call-arg]  # fmt: skip
    return draft_config(LlamaForCausalLM(of), Tokenizer(), context=64)


WRITTEN = {
    path.parent.parent.name: json.loads(path.read_text())
    for path in sorted((ROOT / "launch/demo_models").glob("*/draft/config.json"))
}
WRITTEN["of the recipe"] = by_the_recipe()
WRITTEN["of the recipe, DFlash2"] = dflash2_config(WRITTEN["of the recipe"])


def by_transformers(raw: dict[str, Any], folder: Path) -> PretrainedConfig:
    (folder / "config.json").write_text(json.dumps(raw))
    return AutoConfig.from_pretrained(folder)


@pytest.mark.parametrize("name", WRITTEN)
def test_sglangs_worker_reads_the_same(name: str, tmp_path: Path) -> None:
    ours, theirs = DraftConfig.from_dict(WRITTEN[name]), by_transformers(WRITTEN[name], tmp_path)
    parsed = parse_dflash_draft_config(draft_hf_config=theirs)
    assert parsed.resolve_block_size() == ours.block_size
    assert parsed.mask_token_id == ours.mask_token_id
    assert parsed.target_layer_ids == list(ours.target_layer_ids)
    for i, layer in enumerate(ours.layers):
        window, kind = _get_dflash_layer_attention_params(theirs, i)
        # Theirs is the number of tokens before the query's; -1 for no limit.
        assert window == (-1 if layer.sliding_window is None else layer.sliding_window - 1)
        assert (kind == AttentionType.DECODER) == layer.causal


@pytest.mark.parametrize("name", WRITTEN)
def test_vllm_reads_the_same(name: str, tmp_path: Path) -> None:
    """Compare with what its proposer and its draft model take from the config."""
    ours, theirs = DraftConfig.from_dict(WRITTEN[name]), by_transformers(WRITTEN[name], tmp_path)
    assert all(name.startswith("DFlash") for name in theirs.architectures)
    own = theirs.dflash_config
    assert own["mask_token_id"] == ours.mask_token_id
    assert own["target_layer_ids"] == list(ours.target_layer_ids)
    for layer, kind in zip(ours.layers, theirs.layer_types, strict=True):
        slides = kind == "sliding_attention"
        window = own.get("swa_window_size", theirs.sliding_window) if slides else None
        assert window == layer.sliding_window
        # Without a window it refuses the draft.
        assert window is not None or not slides
        causal = getattr(theirs, "is_causal", None)
        assert (slides if causal is None else causal) == layer.causal


@pytest.mark.parametrize("name", WRITTEN)
def test_z_labs_loop_reads_the_same(name: str, tmp_path: Path) -> None:
    """Its model is Transformers' Qwen3 with these fields, and is never causal."""
    ours, theirs = DraftConfig.from_dict(WRITTEN[name]), by_transformers(WRITTEN[name], tmp_path)
    assert theirs.model_type == "qwen3" and not any(layer.causal for layer in ours.layers)
    assert theirs.block_size == ours.block_size
    assert theirs.num_target_layers == ours.num_target_layers
    assert theirs.dflash_config["target_layer_ids"] == list(ours.target_layer_ids)
    assert theirs.dflash_config["mask_token_id"] == ours.mask_token_id
    rope = theirs.rope_parameters
    assert rope["rope_type"] == "default" and rope["rope_theta"] == ours.rope.theta
    for field in (
        "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "head_dim", "rms_norm_eps", "attention_bias", "vocab_size",
    ):  # fmt: skip
        assert getattr(theirs, field) == getattr(ours, field), field
