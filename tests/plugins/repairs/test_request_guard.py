"""The request guard's checks, without a server."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.managers.io_struct import GenerateReqInput, TokenizedGenerateReqInput
from sglang.srt.sampling.penaltylib.min_new_tokens import BatchedMinNewTokensPenalizer
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_dflash.plugins.repairs import request_guard
from sglang_dflash.plugins.repairs.request_guard import FLOAT32_MAX

VOCAB = 1024
STRUCT_FIELDS = set(TokenizedGenerateReqInput.__struct_fields__)


def manager() -> Any:
    """Make the part of a TokenizerManager that the guard reads."""
    return SimpleNamespace(
        model_config=SimpleNamespace(vocab_size=VOCAB),
        mm_processor=None,
    )


def create(manager: Any, obj: GenerateReqInput, text: Any, ids: Any, *_: Any) -> Any:
    """A short form of SGLang's method: every field, the tokens and sampling parameters made."""
    del manager
    given = {
        field.name: getattr(obj, field.name)
        for field in dataclasses.fields(obj)
        if field.name in STRUCT_FIELDS and field.name != "sampling_logprobs_mode"
    }
    params = SamplingParams(**obj.sampling_params)
    return TokenizedGenerateReqInput(
        **{
            **given,
            "input_text": text,
            "input_ids": ids,
            "mm_inputs": None,
            "token_type_ids": None,
            "sampling_params": params,
            "session_params": None,
        }
    )


def guarded(ids: Any = (1, 2), guard: Any = None, **fields: Any) -> Any:
    """Both checks of a request that is no batch, as for `Engine.generate`."""
    guard = guard or manager()
    fields.setdefault("text", "x")
    obj = GenerateReqInput(**fields)
    request_guard.check_shape(guard, obj)
    obj.normalize_batch_and_arguments()
    return request_guard.check_and_create(create, guard, obj, obj.text, list(ids), None)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "tokens as text": ({"ids": ["a"]}, r"input_ids \(prompt\): .*0 to 1023"),
    "tokens as fractions": ({"ids": [1.5]}, r"input_ids \(prompt\): .*0 to 1023"),
    "a token of 70 bits": ({"ids": [2**70]}, r"input_ids \(prompt\): .*0 to 1023"),
    "a token of a long prompt": ({"ids": [5] * 9 + [1024]}, r"token 9 is 1024"),
    "no text": ({"text": 5}, r"text: 5; a string"),
    "a text that is none": ({"text": ["a", None]}, r"text: \['a', None\]; a string"),
    "temperature": ({"sampling_params": {"temperature": "hot"}}, r"temperature: 'hot'; Expected"),
    "temperature nan": ({"sampling_params": {"temperature": math.nan}}, r"temperature: nan; a fin"),
    "bias nan": ({"sampling_params": {"logit_bias": {"5": math.nan}}}, r"logit_bias\[5\]: nan"),
    "bias by number": ({"sampling_params": {"logit_bias": {5: 1.0}}}, r"logit_bias: \{5: 1\.0\}"),
    "tokens of 70 bits": ({"sampling_params": {"max_new_tokens": 2**70}}, r"max_new_tokens: 1180"),
    "half a token": ({"sampling_params": {"max_new_tokens": 2.5}}, r"max_new_tokens: 2\.5; Expec"),
    "stop tokens": ({"sampling_params": {"stop_token_ids": ["a"]}}, r"stop_token_ids: 'a'; Expe"),
    "stops": ({"sampling_params": {"stop": ["x"] * 129}}, r"stop: \['x'.*; at most 128 of them"),
    "patterns": ({"sampling_params": {"stop_regex": ["x"] * 129}}, r"stop_regex: .*at most 128"),
    "a flag": ({"sampling_params": {"ignore_eos": "yes"}}, r"ignore_eos: 'yes'; Expected `bool`"),
    "a schema": ({"sampling_params": {"json_schema": {}}}, r"json_schema: \{\}; Expected `str"),
    "unknown": ({"sampling_params": {"tempreature": 1}}, r"sampling_params\.tempreature: unknown"),
    "n": ({"sampling_params": {"n": True}}, r"sampling_params\.n: True; an integer from 1"),
    "parameters": ({"sampling_params": "x"}, r"sampling_params: 'x'; an object"),
    "session": ({"session_params": 5}, r"session_params: 5; an object"),
    "rid": ({"rid": 5}, r"rid: 5; Expected `str"),
    "logprob start": ({"logprob_start_len": "a"}, r"logprob_start_len: 'a'; an integer"),
    "top logprobs": ({"top_logprobs_num": True}, r"top_logprobs_num .*: True; an integer from 0"),
    "priority": ({"priority": "high"}, r"priority: 'high'; Expected `int"),
    "room": ({"bootstrap_room": "a"}, r"bootstrap_room: 'a'; Expected `int"),
    "no position": ({"token_indices_to_pool": []}, r"token_indices_to_pool: \[\]; a list of pos"),
    "position": ({"ids": [5] * 3, "token_indices_to_pool": [0, 3]}, r"\[0, 3\]; .* prompt, 0 to 2"),
    "below": ({"token_indices_to_pool": [-1]}, r"token_indices_to_pool: \[-1\]; a list"),
    "scores and tokens": ({"token_indices_to_pool": [0]}, r"max_new_tokens: None; 0 is required"),
    "scores of a part": (
        {
            "token_indices_to_pool": [0],
            "sampling_params": {"max_new_tokens": 0},
            "return_logprob": True,
        },
        r"logprob_start_len: -1; 0 is required with token_indices",
    ),
    "delimiter": ({"multi_item_delimiter_indices": [99]}, r"delimiter_indices: \[99\]; a list"),
    "positions": ({"token_indices_to_pool": 5}, r"token_indices_to_pool: 5; a list"),
    "processor": ({"custom_logit_processor": 5}, r"custom_logit_processor: 5; Expected `str"),
}


@pytest.mark.parametrize("name", BAD)
def test_python_values_of_a_wrong_type_are_value_errors(name: str) -> None:
    fields, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        guarded(**fields)


def test_a_good_request_is_passed_on_as_it_is() -> None:
    made = guarded(
        ids=range(VOCAB),
        sampling_params={
            "temperature": 1,
            "logit_bias": {"5": -100},
            "stop_token_ids": [None, 7],
            "stop_regex": ["a+", "b"],
            "regex": "[0-9]+",
            "custom_params": {"a": 1},
            "top_p": None,
        },
        return_logprob=True,
        top_logprobs_num=VOCAB,
        rid="r",
    )
    assert made.rid == "r" and made.sampling_params.stop_token_ids == {7}
    assert made.input_ids == list(range(VOCAB))


@pytest.mark.parametrize("rid", [None, "r", ["r", "s"]])
def test_sglang_can_clean_up_after_a_refused_stream(rid: Any) -> None:
    """Two seconds after a streamed answer, SGLang aborts what is left of the request."""
    obj = GenerateReqInput(text=["a", "b"], rid=rid, sampling_params=[{}], stream=True)
    with pytest.raises(ValueError, match="list of 1 for a batch of 2"):
        request_guard.check_shape(manager(), obj)
    left = [obj.rid] if obj.is_single else obj.rid
    assert left == (rid if isinstance(rid, list) else [rid])


@pytest.mark.parametrize("given", [{"lora_path": ["x"]}, {"rid": ["r"]}, {}], ids=str)
def test_one_request_with_choices_may_have_lists_of_one(given: dict[str, Any]) -> None:
    """SGLang makes a batch of it."""
    for params in ({"n": 2}, [{"n": 2}]):
        obj = GenerateReqInput(text="a", sampling_params=params, **given)
        request_guard.check_shape(manager(), obj)
        obj.normalize_batch_and_arguments()
        assert obj[0].sampling_params == {"n": 2} and obj[0].lora_path in (None, "x")
        wrong = GenerateReqInput(text="a", sampling_params=params, lora_path=["x", "y"])
        with pytest.raises(ValueError, match=r"lora_path: .* a list of 2 for a batch of 1"):
            request_guard.check_shape(manager(), wrong)


def test_positions_in_the_prompt_are_passed_on() -> None:
    made = guarded(
        ids=[5] * 3, token_indices_to_pool=[0, 2], multi_item_delimiter_indices=[1],
        sampling_params={"max_new_tokens": 0}, return_logprob=True, logprob_start_len=0,
    )  # fmt: skip
    assert made.token_indices_to_pool == [0, 2] and made.multi_item_delimiter_indices == [1]


def test_a_session_may_supply_the_whole_prompt() -> None:
    with pytest.raises(ValueError, match="no tokens"):
        guarded(ids=[], session_params={"rid": "a"})
    assert guarded(ids=[], session_params={"id": "a"}).input_ids == []


def test_placeholders_of_images_may_be_outside_the_vocabulary() -> None:
    sees_images = manager()
    sees_images.mm_processor = object()
    image = {"ids": [-1, 5000], "image_data": "x.png"}
    assert guarded(guard=sees_images, **image).input_ids == [-1, 5000]
    # SGLang ignores the image if the model has no use for it.
    with pytest.raises(ValueError, match="token 0 is -1"):
        guarded(**image)


UNSHAPED: dict[str, dict[str, Any]] = {
    "parameters, a list": {"text": "a", "sampling_params": [{}]},
    "no parameters": {"text": "a", "sampling_params": []},
    "too few": {"text": ["a", "b"], "sampling_params": [{}]},
    "too few values": {"text": ["a", "b"], "return_logprob": [True]},
    "too few ports": {"text": ["a"], "bootstrap_port": []},
    "too few positions": {"text": ["a", "b"], "token_indices_to_pool": [[0]]},
    "too few delimiters": {"text": ["a"], "multi_item_delimiter_indices": []},
    "positions of choices": {
        "text": "a",
        "token_indices_to_pool": [],
        "sampling_params": {"n": 2},
    },
    "embeddings of a batch": {"text": ["a", "b"], "positional_embed_overrides": 5},
    "named embeddings": {"text": ["a", "b"], "positional_embed_overrides": {"a": 1}},
    "too few embeddings": {"text": ["a", "b"], "positional_embed_overrides": [None]},
    "one adapter for all": {"text": ["a", "b"], "lora_id": "x"},
    "too few videos": {"text": ["a", "b"], "video_data": ["a.mp4"]},
    "too few modalities": {"text": ["a", "b"], "modalities": ["image"]},
    "no embeddings": {"input_embeds": []},
    "n": {"text": "a", "sampling_params": {"n": None}},
}


@pytest.mark.parametrize("name", UNSHAPED)
def test_shapes_raise_other_errors_without_the_row(name: str) -> None:
    obj = GenerateReqInput(**UNSHAPED[name])
    with pytest.raises(ValueError):
        request_guard.check_shape(manager(), obj)
    with pytest.raises((TypeError, AttributeError, IndexError, KeyError)):
        obj.normalize_batch_and_arguments()
        for i in range(1 if obj.is_single else obj.batch_size):
            single = obj if obj.is_single else obj[i]
            single.sampling_params.get("max_new_tokens")


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"repetition_penalty": 1e-35}, r"repetition_penalty: 1e-35; from 1\.92e-34 to 2 at"),
        ({"repetition_penalty": 1e-33, "temperature": 0.01}, r"1e-33; from 1\.92e-32 to 2 at temp"),
        ({"logit_bias": {"5": 3e38}, "temperature": 0.5}, r"\[5\]: 3e\+38; at most 1\.7e\+38 at"),
    ],
)
def test_a_logit_that_would_be_infinite_is_refused(params: dict[str, Any], message: str) -> None:
    """No probability would be a number."""
    with pytest.raises(ValueError, match=message):
        guarded(sampling_params=params)
    divisor = torch.tensor(params.get("temperature", 1.0))
    logits = torch.tensor([6e4, 3e4]) / torch.tensor(params.get("repetition_penalty", 1.0))
    logits[0] += params.get("logit_bias", {}).get("5", 0)
    assert torch.softmax(logits.div_(divisor), dim=-1).isnan().all()


def test_large_biases_and_small_penalties_are_passed_on() -> None:
    forced = {"5": FLOAT32_MAX, "6": -FLOAT32_MAX}
    for params in (
        {"logit_bias": forced, "temperature": temperature} for temperature in (0.0, 1e-7, 1.0, 2.0)
    ):
        assert guarded(sampling_params=params).sampling_params.logit_bias == forced
    params = {"logit_bias": {"6": -FLOAT32_MAX}, "temperature": 1e-5, "repetition_penalty": 1e-20}
    assert guarded(sampling_params=params).sampling_params.repetition_penalty == 1e-20


@pytest.mark.parametrize("unknown", [VOCAB, 128009, -1])
def test_stop_tokens_outside_the_vocabulary_are_left_out(unknown: int) -> None:
    """Alone they are harmless, so they are not refused. Beside a request with `min_new_tokens` they
    are indices of a tensor."""
    made = guarded(sampling_params={"stop_token_ids": [7, unknown]})
    assert made.sampling_params.stop_token_ids == {7}
    made = guarded(sampling_params={"stop_token_ids": [unknown]})
    assert made.sampling_params.stop_token_ids is None


def test_sglangs_penalty_fails_for_stop_tokens_outside_the_vocabulary() -> None:
    def penalty(*params: SamplingParams) -> None:
        tokenizer = SimpleNamespace(additional_stop_token_ids=None, eos_token_id=2)
        requests = [
            SimpleNamespace(sampling_params=each, eos_token_ids=None, tokenizer=tokenizer)
            for each in params
        ]
        batch = SimpleNamespace(reqs=lambda: requests, device="cpu", vocab_size=VOCAB)
        penalizer: Any = SimpleNamespace(orchestrator=batch)
        BatchedMinNewTokensPenalizer._prepare(penalizer)

    waits = SamplingParams(min_new_tokens=2)
    penalty(waits, SamplingParams(stop_token_ids={7}))
    with pytest.raises(RuntimeError, match="out of bounds"):
        penalty(waits, SamplingParams(stop_token_ids={128009}))
