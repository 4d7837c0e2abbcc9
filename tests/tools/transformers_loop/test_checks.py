"""The errors of `spec_generate` name the argument and its value."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import BatchEncoding, Qwen3Config, Qwen3ForCausalLM, Qwen3Model

from sglang_dflash import DFlashDraftModel
from sglang_dflash.common.errors import ConfigError
from sglang_dflash.tools.transformers_loop import spec_generate
from tests.tools.transformers_loop.conftest import NEW_TOKENS, SHAPE, greedy

IDS = torch.tensor([[3, 9, 27]])


def test_what_a_tokenizer_returns_is_a_prompt(draft: DFlashDraftModel, target: Any) -> None:
    encoded = BatchEncoding({"input_ids": IDS, "attention_mask": torch.ones_like(IDS)})
    expected = greedy(target, IDS)
    assert spec_generate(draft, target, encoded, NEW_TOKENS).tokens == expected
    assert draft.spec_generate(target, encoded, NEW_TOKENS).tolist() == [[3, 9, 27, *expected]]
    out = draft.spec_generate(target, IDS.int(), NEW_TOKENS)
    assert out.dtype == torch.int64 and out.tolist() == [[3, 9, 27, *expected]]


PROMPTS: dict[str, tuple[Any, Any]] = {
    "text": ("a text", "a text"),
    "list": ([[3, 9]], [[3, 9]]),
    "list in a mapping": ({"input_ids": [3, 9]}, [3, 9]),
    "mapping": ({"ids": IDS}, None),
    "no batch": (IDS[0], [3]),
    "two prompts": (IDS.repeat(2, 1), [2, 3]),
    "empty": (IDS[:, :0], [1, 0]),
    "fractions": (IDS.float(), torch.float32),
    "above the vocabulary": (IDS + 60, 87),
    "below": (IDS - 5, -2),
}


def refused(call: Callable[[], object], field: str) -> ConfigError:
    with pytest.raises(ConfigError) as raised:
        call()
    assert raised.value.field == field and raised.value.required
    return raised.value


@pytest.mark.parametrize("name", PROMPTS)
def test_prompts(draft: DFlashDraftModel, target: Any, name: str) -> None:
    prompt, value = PROMPTS[name]
    assert refused(lambda: spec_generate(draft, target, prompt, 4), "input_ids").value == value
    assert refused(lambda: draft.spec_generate(target, prompt, 4), "input_ids").value == value


def test_a_padded_prompt(draft: DFlashDraftModel, target: Any) -> None:
    padded = {"input_ids": IDS, "attention_mask": torch.tensor([[0, 1, 1]])}
    refused(lambda: draft.spec_generate(target, padded, 4), "attention_mask")


def test_what_is_no_loaded_model_or_of_another_pair(draft: DFlashDraftModel, target: Any) -> None:
    refused(lambda: spec_generate("z-lab/Qwen3-8B-DFlash-b16", target, IDS, 4), "draft")
    refused(lambda: draft.spec_generate("Qwen/Qwen3-8B", IDS, 4), "target")
    headless = Qwen3Model(target.config)
    assert refused(lambda: draft.spec_generate(headless, IDS, 4), "target").value == "Qwen3Model"
    narrow = Qwen3ForCausalLM(Qwen3Config(**{**SHAPE, "hidden_size": 16}))
    refused(lambda: draft.spec_generate(narrow, IDS, 4), "hidden_size in the draft's config.json")


def test_mixed_dtypes_and_devices(draft: DFlashDraftModel, target: Any) -> None:
    with torch.device("meta"):
        elsewhere = Qwen3ForCausalLM(target.config)
    assert refused(lambda: draft.spec_generate(elsewhere, IDS, 4), "device_map").value == "meta"
    elsewhere.lm_head = torch.nn.Linear(32, 64, bias=False)
    assert refused(lambda: draft.spec_generate(elsewhere, IDS, 4), "device_map").value == (
        "cpu, meta"
    )
    half = draft.to(torch.bfloat16)
    assert refused(lambda: half.spec_generate(target, IDS, 4), "dtype").value == torch.float32


@pytest.mark.parametrize(
    "field, arguments",
    [
        *(("stop_token_ids", (4, stops)) for stops in (5, [None], "ab", [5.0])),
        *(("max_new_tokens", (count,)) for count in (0, -3, 2.5)),
        *(("temperature", (4, [], heat)) for heat in (-1.0, math.nan, math.inf, None)),
    ],
)
def test_arguments(
    draft: DFlashDraftModel, target: Any, field: str, arguments: tuple[Any, ...]
) -> None:
    refused(lambda: draft.spec_generate(target, IDS, *arguments), field)
