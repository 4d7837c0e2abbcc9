"""The published Transformers snippet: `DFlashDraftModel.from_pretrained` and `spec_generate`."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang_dflash import DFlashDraftModel
from sglang_dflash.common.errors import ConfigError
from sglang_dflash.drafting.options import Options
from sglang_dflash.drafting.weights import save_model
from sglang_dflash.tools.demo_pairs.pairs import demo_pair
from tests.conftest import random_model, raw_config
from tests.errors import refused
from tests.tools.transformers_loop.conftest import NEW_TOKENS, greedy

# From z-lab/dflash's README, "Transformers". What differs: the import of the draft's class and its
# name, the paths, the device, and the prompt. `device_map` for the target needs accelerate, which
# SGLang does not install; without a GPU it would change nothing.
PUBLISHED = """
from sglang_dflash import DFlashDraftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

draft = DFlashDraftModel.from_pretrained({draft!r}, trust_remote_code=True, dtype="auto", device_map="cpu").eval()
target = AutoModelForCausalLM.from_pretrained({target!r}, dtype="auto").eval()
tokenizer = AutoTokenizer.from_pretrained({target!r})

messages = [{{"role": "user", "content": {prompt!r}}}]
input_ids = tokenizer.apply_chat_template(messages, return_tensors="pt", add_generation_prompt=True, enable_thinking=False).to(draft.device)

output = draft.spec_generate(input_ids=input_ids, max_new_tokens=24, temperature=0.0, target=target, stop_token_ids=[tokenizer.eos_token_id])
print(tokenizer.decode(output[0], skip_special_tokens=False))
"""  # noqa: E501


@pytest.mark.parametrize("kind", ["dense", "hybrid"])
def test_the_published_snippet(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    pair = demo_pair(kind)
    names: dict[str, Any] = {}
    exec(  # The snippet is the program under test.
        PUBLISHED.format(draft=str(pair.draft), target=str(pair.target), prompt=pair.prompts[0]),
        names,
    )
    target, tokenizer, prompt = names["target"], names["tokenizer"], names["input_ids"]["input_ids"]
    assert target.dtype == names["draft"].dtype == torch.bfloat16
    expected = [*prompt[0].tolist(), *greedy(target, prompt, tokenizer.eos_token_id)]
    assert names["output"].tolist() == [expected]
    assert capsys.readouterr().out == tokenizer.decode(expected) + "\n"


def test_the_result_ends_with_the_first_stop_token(draft: DFlashDraftModel, target: Any) -> None:
    """z-lab's does, too: the stop token is part of it, and one in the prompt does not count."""
    ids = torch.randint(0, 64, (1, 6))
    whole = greedy(target, ids)
    stop = whole[15]
    ids = torch.cat([torch.tensor([[stop]]), ids], 1)
    whole = greedy(target, ids)
    stops = [stop, whole[15]]
    out = draft.spec_generate(target, ids, NEW_TOKENS, stops, 0.0)[0, 7:].tolist()
    end = next(i for i, token in enumerate(whole) if token in stops)
    assert out == whole[: end + 1]


def test_a_temperature_samples_and_options_are_taken(draft: DFlashDraftModel, target: Any) -> None:
    ids = torch.randint(0, 64, (1, 6))
    plain = greedy(target, ids)

    def sampled(seed: int) -> list[int]:
        torch.manual_seed(seed)
        return draft.spec_generate(target, ids, NEW_TOKENS, [], 30.0)[0, 6:].tolist()

    assert sampled(1) == sampled(1) != plain and sampled(1) != sampled(2)
    # Below 1e-5, z-lab's code takes the argmax.
    assert draft.spec_generate(target, ids, NEW_TOKENS, [], 1e-6)[0, 6:].tolist() == plain
    out = draft.spec_generate(target, ids, NEW_TOKENS, options=Options(verify_block=2, window=4))
    assert out[0, 6:].tolist() == plain


def test_dtype_as_transformers_takes_it(folder: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(folder, tmp_path / "draft"))

    def dtype(value: Any) -> torch.dtype:
        return DFlashDraftModel.from_pretrained(str(folder), dtype=value).dtype

    assert dtype("bfloat16") == dtype(torch.bfloat16) == dtype("torch.bfloat16") == torch.bfloat16
    assert dtype("auto") == dtype(None) == torch.float32
    for field in ("torch_dtype", "dtype"):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {field: "float16"}))
        assert dtype("auto") == torch.float16
        (folder / "config.json").write_text(json.dumps(config))
    with refused("dtype", "int8"):
        dtype("int8")


@pytest.mark.parametrize(
    "device_map", [None, "cpu", torch.device("cpu"), {"": "cpu"}, "auto"], ids=str
)
def test_device_map_as_transformers_takes_it(folder: Path, device_map: Any) -> None:
    draft = DFlashDraftModel.from_pretrained(str(folder), device_map=device_map)
    expected = "cpu"
    if device_map == "auto" and torch.accelerator.is_available():
        expected = torch.accelerator.current_accelerator().type
    assert draft.device.type == expected


def test_devices_that_are_absent_or_several_are_refused(folder: Path) -> None:
    for device_map in ("abacus", {"layers.0": "cpu", "layers.1": "meta"}):
        with refused("device_map", device_map):
            DFlashDraftModel.from_pretrained(str(folder), device_map=device_map)


def test_to_converts_all_of_the_draft(draft: DFlashDraftModel, target: Any) -> None:
    """The joined projections follow the weights; the rotary table stays float32."""
    ids, target = torch.randint(0, 64, (1, 9)), copy.deepcopy(target).double()
    converted = draft.to(torch.float64)
    assert converted.rotary.frequencies.dtype == torch.float32
    hidden = torch.randn(1, draft.config.target_hidden_width)
    assert draft.project_context(draft.context_features(hidden)).dtype == torch.float64
    out = converted.spec_generate(target, ids, NEW_TOKENS)
    assert out[0, 9:].tolist() == greedy(target, ids)
    with torch.no_grad():
        converted.float()
    assert draft.project_context(draft.context_features(hidden)).dtype == torch.float32


def test_an_lm_head_of_its_own_keeps_its_tokens(tmp_path: Path) -> None:
    raw = raw_config(draft_vocab_size=24)
    saved = random_model(raw)
    save_model(saved, raw, tmp_path, torch.float32)
    draft = DFlashDraftModel.from_pretrained(str(tmp_path), dtype="float32")
    for loaded in (draft, draft.to(torch.bfloat16)):
        assert saved.token_ids is not None and loaded.token_ids is not None
        assert loaded.token_ids.tolist() == saved.token_ids.tolist()


def test_a_draft_that_is_not_there_is_refused(tmp_path: Path) -> None:
    for folder in (tmp_path / "nowhere", demo_pair("dense").target):
        with pytest.raises(ConfigError):
            DFlashDraftModel.from_pretrained(str(folder))
