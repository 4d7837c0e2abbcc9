"""The client: streamed greedy answers, their times, and a pass over the prompts."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import requests

from sglang_dflash.bench.datasets import Prompt
from sglang_dflash.core.acceptance_length import VerifySteps, of_answer

TIMEOUT_S = 600
# A text, or token ids.
Input = str | list[int]
# What a row of the report calls the tokens per verify step: core/acceptance_length.py, or vLLM's
# own count, which includes tokens that a request does not keep.
OURS, VLLMS = "acceptance_length", "vllm_acceptance_length"


class RequestFailed(RuntimeError):
    """A server refused a request, broke off, or could not be reached."""


@dataclass(frozen=True)
class Answer:
    """One streamed answer.

    Attributes:
        ids: None if the server names none.
        tokens: number of new tokens.
        first_token_s: seconds from sending to the first token.
        seconds: seconds from sending to the end.
        verify_steps: 0 if the server counts none.
    """

    text: str
    ids: tuple[int, ...] | None
    tokens: int
    first_token_s: float
    seconds: float
    verify_steps: int = 0

    @property
    def per_token_s(self) -> float | None:
        """Seconds per token after the first; None for a single token."""
        return (self.seconds - self.first_token_s) / (self.tokens - 1) if self.tokens > 1 else None


@dataclass(frozen=True)
class Pass:
    """All prompts answered once.

    `answers`: by prompt, then by turn; `seconds`: from the first request to the last answer;
    `definition`: by which `speculation` was counted, `OURS` or `VLLMS`.
    """

    seconds: float
    answers: list[list[Answer]]
    speculation: VerifySteps
    definition: str = OURS

    @property
    def tokens(self) -> int:
        return sum(answer.tokens for turns in self.answers for answer in turns)


def chunks(url: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """POST and yield the JSON objects of the event stream as they come. Raises RequestFailed."""
    try:
        with requests.post(url, json=body, stream=True, timeout=TIMEOUT_S) as response:
            if not response.ok:
                raise RequestFailed(f"{url}: status {response.status_code}, {response.text[:300]}")
            # Without chunked encoding a read waits until its buffer is full, and tokens come late.
            for line in response.iter_lines(chunk_size=512 if response.raw.chunked else 1):
                if line.startswith(b"data: {"):
                    chunk = json.loads(line[6:])
                    if "error" in chunk:
                        raise RequestFailed(f"{url}: {chunk['error']}")
                    yield chunk
    except requests.RequestException as error:
        raise RequestFailed(f"{url}: {error}") from error


@dataclass(frozen=True)
class SGLang:
    """An SGLang server by its own API, which names token ids and verify steps."""

    url: str

    def ask(self, prompt: Input, max_new_tokens: int, ignore_eos: bool) -> Answer:
        sampling = {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": ignore_eos}
        body = {
            "text" if isinstance(prompt, str) else "input_ids": prompt,
            "sampling_params": sampling,
            "stream": True,
        }
        began, first, ids, text, meta = time.perf_counter(), None, list[int](), "", dict[str, Any]()
        for chunk in chunks(f"{self.url}/generate", body):
            now, meta = time.perf_counter(), chunk["meta_info"]
            if first is None and meta["completion_tokens"]:
                first = now
            # All tokens so far or only new tokens, by a server flag. The first chunk is both.
            whole = len(chunk["output_ids"]) == meta["completion_tokens"]
            ids = chunk["output_ids"] if whole else ids + chunk["output_ids"]
            text = chunk["text"] if whole else text + chunk["text"]
        if first is None or len(ids) != meta["completion_tokens"]:
            raise RequestFailed(
                f"{self.url}: the stream holds {len(ids)} tokens of {meta.get('completion_tokens')}"
            )
        return Answer(
            text, tuple(ids), len(ids), first - began, now - began, meta.get("spec_verify_ct") or 0
        )

    def flush(self) -> bool:
        """Forget cached prefixes, so that a prompt costs the same each time. False on failure."""
        return requests.post(f"{self.url}/flush_cache", params={"timeout": 30}, timeout=60).ok

    def counted(self) -> VerifySteps:
        # Every answer holds its own count.
        return VerifySteps()


@dataclass(frozen=True)
class OpenAI:
    """Any server of the OpenAI API, by /v1/completions; acceptance is vLLM's, from /metrics."""

    url: str
    model: str

    def ask(self, prompt: Input, max_new_tokens: int, ignore_eos: bool) -> Answer:
        body: dict[str, Any] = {
            "model": self.model, "prompt": prompt, "max_tokens": max_new_tokens, "temperature": 0,
            "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        if ignore_eos:
            # An extension of OpenAI's API, so it is sent only if it is needed.
            body["ignore_eos"] = True
        began, first, text, tokens = time.perf_counter(), None, "", 0
        last = began
        for chunk in chunks(f"{self.url}/v1/completions", body):
            for choice in chunk.get("choices") or ():
                if choice.get("text"):
                    last = time.perf_counter()
                    first = first or last
                    text += choice["text"]
            tokens = (chunk.get("usage") or {}).get("completion_tokens") or tokens
        if first is None or not tokens:
            raise RequestFailed(
                f"{self.url}: an answer without text, or without `usage`, "
                "whose tokens cannot be counted"
            )
        return Answer(text, None, tokens, first - began, last - began)

    def flush(self) -> bool:
        """See `SGLang.flush`. vLLM can do so only in its development mode."""
        return requests.post(f"{self.url}/reset_prefix_cache", timeout=60).ok

    def counted(self) -> VerifySteps:
        response = requests.get(f"{self.url}/metrics", timeout=60)
        totals = {"drafts": 0, "accepted_tokens": 0}
        for line in response.text.splitlines() if response.ok else ():
            for name in totals:
                # A series per engine.
                if line.startswith(f"vllm:spec_decode_num_{name}_total"):
                    totals[name] += int(float(line.rsplit(" ", 1)[1]))
        return VerifySteps(totals["drafts"], totals["drafts"] + totals["accepted_tokens"])


Endpoint = SGLang | OpenAI


def _check_real(url: str, states: list[dict[str, Any]]) -> None:
    """Raise RequestFailed if our worker reports a simulated acceptance; others report none."""
    lengths = {(state.get("dflash") or {}).get("simulated_acceptance") for state in states} - {None}
    if lengths:
        raise RequestFailed(
            f"{url}: simulates an acceptance of {lengths.pop():g}; "
            "restart it without SGLANG_SIMULATE_ACC_LEN"
        )


def endpoint(url: str) -> Endpoint:
    """The kind of server at that address.

    Raises:
        RequestFailed: neither kind answers, or its acceptance is simulated.
    """
    url = url.rstrip("/").removesuffix("/v1")
    try:
        info = requests.get(f"{url}/server_info", timeout=60)
        if info.ok and "internal_states" in info.json():
            _check_real(url, info.json()["internal_states"])
            return SGLang(url)
        models = requests.get(f"{url}/v1/models", timeout=60)
        models.raise_for_status()
        return OpenAI(url, models.json()["data"][0]["id"])
    except (requests.RequestException, KeyError, IndexError) as error:
        raise RequestFailed(
            f"{url}: neither SGLang nor a server of the OpenAI API "
            f"({type(error).__name__}: {error})"
        ) from error


def run(
    to: Endpoint,
    prompts: list[Prompt],
    concurrency: int,
    ask: Callable[[Endpoint, Prompt, list[str]], Answer],
    on_answer: Callable[[], Any] = lambda: None,
) -> Pass:
    """Every prompt once, `concurrency` conversations at a time.

    Args:
        ask: sends the next turn of a prompt, given the answers to the turns before it.
        on_answer: called after every conversation.
    """

    def converse(prompt: Prompt) -> list[Answer]:
        answers: list[Answer] = []
        for _ in prompt.turns:
            answers.append(ask(to, prompt, [answer.text for answer in answers]))
        on_answer()
        return answers

    before, began = to.counted(), time.perf_counter()
    with ThreadPoolExecutor(concurrency) as pool:
        answers = list(pool.map(converse, prompts))
    seconds = time.perf_counter() - began
    by_answer = (of_answer(a.verify_steps, a.tokens) for turns in answers for a in turns)
    ours = sum(by_answer, VerifySteps())
    if ours.steps:
        return Pass(seconds, answers, ours)
    theirs = to.counted() - before
    return Pass(seconds, answers, theirs, VLLMS if theirs.steps else OURS)
