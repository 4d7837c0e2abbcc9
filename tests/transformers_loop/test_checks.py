"""What `spec_generate` refuses names the argument and says what would be right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BatchEncoding, Qwen3Config, Qwen3ForCausalLM, Qwen3Model

from sglang_dflash import DFlashDraftModel
from sglang_dflash.facts.errors import ConfigError
from sglang_dflash.transformers_loop import spec_generate
from tests.transformers_loop.test_draft_model import save_random_draft
from tests.transformers_loop.test_generation import NEW_TOKENS, SHAPE, greedy, randomized

IDS = torch.tensor([[3, 9, 27]])


@pytest.fixture(scope="module")
def target() -> Any:
    torch.manual_seed(5)
    return randomized(Qwen3ForCausalLM(Qwen3Config(**SHAPE, tie_word_embeddings=True)))


@pytest.fixture
def draft(tmp_path: Path) -> DFlashDraftModel:
    return DFlashDraftModel.from_pretrained(str(save_random_draft(tmp_path)))


def test_what_a_tokenizer_returns_is_a_prompt(draft: DFlashDraftModel, target: Any) -> None:
    encoded = BatchEncoding({"input_ids": IDS, "attention_mask": torch.ones_like(IDS)})
    expected = greedy(target, IDS)
    assert spec_generate(draft, target, encoded, NEW_TOKENS).tokens == expected
    assert draft.spec_generate(target, encoded, NEW_TOKENS).tolist() == [[3, 9, 27, *expected]]
    assert draft.spec_generate(target, IDS.int(), NEW_TOKENS).tolist() == [[3, 9, 27, *expected]]


@pytest.mark.parametrize(
    "prompt, message",
    [
        ("a text", "input_ids: 'a text' is no tensor; call the tokenizer with return_tensors"),
        ([[3, 9]], "input_ids: a list is no tensor"),
        ({"input_ids": [3, 9]}, "input_ids: a list is no tensor"),
        ({"ids": IDS}, "input_ids: a mapping of ids; the key input_ids is required"),
        (
            {"input_ids": IDS, "attention_mask": torch.tensor([[0, 1, 1]])},
            "attention_mask: 1 tokens are masked; one prompt without padding is required",
        ),
        (IDS[0], r"input_ids: a tensor of shape \[3\]; \[1, N\] is required"),
        (IDS.repeat(2, 1), "input_ids: 2 rows; one prompt at a time"),
        (IDS[:, :0], "input_ids: the prompt is empty; at least one token is required"),
        (IDS.float(), "input_ids: a tensor of torch.float32; integers are required"),
        (IDS + 60, "input_ids: 87 is outside the target's vocabulary of 64 ids"),
        (IDS - 5, "input_ids: -2 is outside"),
    ],
)
def test_prompts(draft: DFlashDraftModel, target: Any, prompt: Any, message: str) -> None:
    for generate in (
        lambda: spec_generate(draft, target, prompt, 4),
        lambda: draft.spec_generate(target, prompt, 4),
    ):
        with pytest.raises(ConfigError, match=message):
            generate()


def test_names_in_place_of_models(draft: DFlashDraftModel, target: Any) -> None:
    with pytest.raises(ConfigError, match="draft: 'z-lab/Qwen3-8B-DFlash-b16' is no loaded draft"):
        spec_generate("z-lab/Qwen3-8B-DFlash-b16", target, IDS, 4)
    with pytest.raises(ConfigError, match=r"target: 'Qwen/Qwen3-8B' is no .*AutoModelForCausalLM"):
        draft.spec_generate("Qwen/Qwen3-8B", IDS, 4)
    with pytest.raises(ConfigError, match="target: Qwen3Model has no lm_head; load it with"):
        draft.spec_generate(Qwen3Model(target.config), IDS, 4)


def test_mixed_dtypes_and_devices(draft: DFlashDraftModel, target: Any) -> None:
    message = "dtype: the draft is in torch.bfloat16, the target in torch.float32; load both"
    with pytest.raises(ConfigError, match=message):
        draft.to(torch.bfloat16).spec_generate(target, IDS, 4)
    with torch.device("meta"):
        elsewhere = Qwen3ForCausalLM(target.config)
    with pytest.raises(ConfigError, match="device_map: the draft is on cpu, the target on meta"):
        draft.spec_generate(elsewhere, IDS, 4)
    elsewhere.lm_head = torch.nn.Linear(32, 64, bias=False)
    with pytest.raises(ConfigError, match="target: its weights are on cpu, meta; one device"):
        draft.spec_generate(elsewhere, IDS, 4)


@pytest.mark.parametrize("stops", [5, [None], "ab", [5.0]])
def test_stop_tokens(draft: DFlashDraftModel, target: Any, stops: Any) -> None:
    with pytest.raises(ConfigError, match=r"stop_token_ids: .* a list of token ids is required"):
        draft.spec_generate(target, IDS, 4, stops)


@pytest.mark.parametrize("count", [0, -3, 2.5])
def test_new_tokens(draft: DFlashDraftModel, target: Any, count: Any) -> None:
    with pytest.raises(ConfigError, match=f"max_new_tokens: {count}; a positive number"):
        draft.spec_generate(target, IDS, count)
