"""What clients do: OpenAI chat and completions, streaming, stops, several at once, bad requests."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import requests
from openai import OpenAI

from sglang_dflash.bench.server import Server
from tests.engine import workload
from tests.engine.servers import DFLASH

pytestmark = pytest.mark.server(DFLASH)

QUESTION = [
    {
        "role": "user",
        "content": '"""A generally useful event scheduler class.\n\n'
        "Each instance of this class manages its own queue.\n",
    }
]


@pytest.fixture
def client(server: Server) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key="EMPTY")


def chat(client: OpenAI, **more: Any) -> Any:
    return client.chat.completions.create(
        model="default", messages=QUESTION, temperature=0, **{"max_tokens": 32, **more}
    )


def test_chat_and_streamed_chat_agree(client: OpenAI) -> None:
    whole = chat(client)
    assert whole.choices[0].message.content and whole.usage.completion_tokens == 32
    pieces = [
        chunk.choices[0].delta.content or "" for chunk in chat(client, stream=True) if chunk.choices
    ]
    assert "".join(pieces) == whole.choices[0].message.content
    assert len(pieces) > 3


def test_completions(client: OpenAI) -> None:
    prompt = workload.prompts()["demo"][0]
    done = client.completions.create(model="default", prompt=prompt, temperature=0, max_tokens=24)
    assert done.choices[0].text and done.usage.completion_tokens == 24


def test_stop_strings_end_inside_a_block(server: Server) -> None:
    text = workload.prompts()["demo"][1]
    full = server.generate(text, temperature=0, max_new_tokens=40, ignore_eos=True)["text"]
    stop = full[len(full) // 2 : len(full) // 2 + 4]
    stopped = server.generate(text, temperature=0, max_new_tokens=40, ignore_eos=True, stop=[stop])
    assert stopped["text"] == full[: full.index(stop)]
    assert stopped["meta_info"]["finish_reason"]["type"] == "stop"


def test_stop_token_inside_a_block_ends_the_request_there(server: Server) -> None:
    text = workload.prompts()["demo"][2]
    full = server.generate(text, temperature=0, max_new_tokens=40, ignore_eos=True)["output_ids"]
    # The first occurrence of a token that is not at the start.
    token = next(t for i, t in enumerate(full) if i > 10 and full.index(t) == i)
    stopped = server.generate(text, temperature=0, max_new_tokens=40, stop_token_ids=[token])
    assert stopped["output_ids"] == full[: full.index(token) + 1]


@pytest.mark.parametrize("limit", [1, 2, 7, 8, 9, 23])
def test_max_tokens_is_kept_to_the_token(server: Server, limit: int) -> None:
    assert (
        server.generate("import sys\n", temperature=0, max_new_tokens=limit, ignore_eos=True)[
            "meta_info"
        ]["completion_tokens"]
        == limit
    )


def test_two_at_once_answer_as_one_by_one(client: OpenAI) -> None:
    prompts = workload.prompts()["demo"][3:5]

    def ask(prompt: str) -> str:
        return (
            client.completions.create(model="default", prompt=prompt, temperature=0, max_tokens=40)
            .choices[0]
            .text
        )

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(ask, prompts)) == [ask(p) for p in prompts]


def test_n_choices(client: OpenAI) -> None:
    choices = chat(client, n=3).choices
    assert len({c.message.content for c in choices}) == 1 and len(choices) == 3


def test_logprobs_are_those_of_the_committed_tokens(server: Server) -> None:
    request = {
        "text": workload.prompts()["demo"][0],
        "sampling_params": {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True},
        "return_logprob": True,
        "top_logprobs_num": 2,
    }
    answer = requests.post(f"{server.url}/generate", json=request, timeout=60).json()
    info = answer["meta_info"]
    assert [token for _, token, _ in info["output_token_logprobs"]] == answer["output_ids"]
    # Greedy: the token's own log-probability is the largest.
    assert all(
        top[0][0] == own[0]
        for own, top in zip(info["output_token_logprobs"], info["output_top_logprobs"], strict=True)
    )


def test_an_aborted_request_leaves_the_server_well(server: Server) -> None:
    def hang_up() -> None:
        request = {
            "text": "x = ",
            "sampling_params": {"temperature": 0, "max_new_tokens": 4000, "ignore_eos": True},
            "stream": True,
        }
        with requests.post(
            f"{server.url}/generate", json=request, stream=True, timeout=60
        ) as response:
            next(response.iter_lines())

    threads = [threading.Thread(target=hang_up) for _ in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert (
        server.generate("import os\n", temperature=0, max_new_tokens=4)["meta_info"][
            "completion_tokens"
        ]
        == 4
    )


def test_a_logit_bias_holds_at_every_position_of_a_block(server: Server) -> None:
    """A bias of +100 forces one token at every position; -100 on the greedy token avoids it."""
    forced = server.generate(
        "import os\n", temperature=0, max_new_tokens=12, ignore_eos=True, logit_bias={"77": 100}
    )
    assert forced["output_ids"] == [77] * 12
    first = server.generate("import os\n", temperature=0, max_new_tokens=1)["output_ids"][0]
    avoided = server.generate(
        "import os\n",
        temperature=0,
        max_new_tokens=12,
        ignore_eos=True,
        logit_bias={str(first): -100},
    )
    assert first not in avoided["output_ids"]


WRONG = {
    "temperature": {"temperature": -1},
    "top_p": {"top_p": 2},
    "top_k": {"top_k": -5},
    "min_p": {"min_p": 3},
    "max_new_tokens": {"max_new_tokens": -3},
}


@pytest.mark.parametrize("field", WRONG)
def test_invalid_sampling_parameters_are_a_400_that_names_them(server: Server, field: str) -> None:
    response = requests.post(
        f"{server.url}/generate", json={"text": "x", "sampling_params": WRONG[field]}, timeout=60
    )
    assert response.status_code == 400 and field in response.text
    assert server.generate("x", temperature=0, max_new_tokens=2)["output_ids"]


def test_a_prompt_over_the_context_length_is_a_400(server: Server) -> None:
    response = requests.post(
        f"{server.url}/generate",
        json={"input_ids": [5] * 40_000, "sampling_params": {}},
        timeout=60,
    )
    assert response.status_code == 400 and "length" in response.text
    assert server.generate("x", temperature=0, max_new_tokens=2)["output_ids"]
