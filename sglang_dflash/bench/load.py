"""The client: streamed answers, their times, and a pass over the prompts."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import requests

from sglang_dflash.bench.prompt import Input, Prompt
from sglang_dflash.drafting.acceptance_length import VerifySteps, of_answer

TIMEOUT_S = 600
# What a row of the report calls the tokens per verify step: drafting/acceptance_length.py, or
# vLLM's own count, which includes tokens that a request does not keep.
OURS, VLLMS = "acceptance_length", "vllm_acceptance_length"


class RequestFailed(RuntimeError):
    """A server refused a request, broke off, or could not be reached."""


class Sampling(NamedTuple):
    """How a server picks tokens. Greedy by default; None leaves a value to the server."""

    temperature: float = 0.0
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    presence_penalty: float | None = None

    def fields(self) -> dict[str, float | int]:
        """The fields of a request."""
        return {name: value for name, value in self._asdict().items() if value is not None}


GREEDY = Sampling()


@dataclass(frozen=True)
class Answer:
    """One streamed answer.

    Attributes:
        ids: None if the server names none.
        tokens: number of new tokens.
        first_token_s: seconds from sending to the first token.
        seconds: seconds from sending to the end.
        verify_steps: 0 if the server counts none.
        gaps_s: seconds before each token after the first piece. Tokens that come in one piece share
            its time evenly, as in SGLang's bench_serving; a piece whose tokens are not counted is
            one gap.
        correct_drafts: entry i is the number of verify steps in which the target agreed with i
            drafted tokens, as SGLang counts it; empty if the server does not count.
    """

    text: str
    ids: tuple[int, ...] | None
    tokens: int
    first_token_s: float
    seconds: float
    verify_steps: int = 0
    gaps_s: tuple[float, ...] = ()
    correct_drafts: tuple[int, ...] = ()

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


class Clock:
    """When an answer's tokens arrive."""

    def __init__(self) -> None:
        self.began = self.last = time.perf_counter()
        self.first: float | None = None
        self.gaps: list[float] = []

    def arrived(self, tokens: int = 1) -> None:
        """Note that so many tokens have come just now, together."""
        now = time.perf_counter()
        if self.first is None:
            self.first = now
        else:
            self.gaps += [(now - self.last) / tokens] * tokens
        self.last = now


def chunks(
    url: str, body: dict[str, Any], timeout_s: float = TIMEOUT_S
) -> Iterator[dict[str, Any]]:
    """POST and yield the JSON objects of the event stream as they come. Raises RequestFailed."""
    try:
        with requests.post(url, json=body, stream=True, timeout=timeout_s) as response:
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
    sampling: Sampling = GREEDY
    timeout_s: float = TIMEOUT_S

    def ask(self, prompt: Input, max_new_tokens: int, ignore_eos: bool) -> Answer:
        sampling = self.sampling.fields()
        if "seed" in sampling:
            sampling["sampling_seed"] = sampling.pop("seed")
        body = {
            "text" if isinstance(prompt, str) else "input_ids": prompt,
            "sampling_params": {
                **sampling, "max_new_tokens": max_new_tokens, "ignore_eos": ignore_eos,
            },
            "stream": True,
        }  # fmt: skip
        clock, ids, text, meta, seen = Clock(), list[int](), "", dict[str, Any](), 0
        for chunk in chunks(f"{self.url}/generate", body, self.timeout_s):
            meta = chunk["meta_info"]
            if meta["completion_tokens"] > seen:
                clock.arrived(meta["completion_tokens"] - seen)
                seen = meta["completion_tokens"]
            # All tokens so far or only new tokens, by a server flag. The first chunk is both.
            whole = len(chunk["output_ids"]) == meta["completion_tokens"]
            ids = chunk["output_ids"] if whole else ids + chunk["output_ids"]
            text = chunk["text"] if whole else text + chunk["text"]
        ended = time.perf_counter()
        if clock.first is None or len(ids) != meta["completion_tokens"]:
            raise RequestFailed(
                f"{self.url}: the stream holds {len(ids)} tokens of {meta.get('completion_tokens')}"
            )
        return Answer(
            text,
            tuple(ids),
            len(ids),
            clock.first - clock.began,
            ended - clock.began,
            meta.get("spec_verify_ct") or 0,
            tuple(clock.gaps),
            tuple(meta.get("spec_correct_drafts_histogram") or ()),
        )

    def flush(self) -> bool:
        """Forget cached prefixes, so that a prompt costs the same each time. False on failure."""
        return requests.post(f"{self.url}/flush_cache", params={"timeout": 30}, timeout=60).ok

    def counted(self) -> VerifySteps:
        """Steps without drafts so far, which an answer's own count includes."""
        info = requests.get(f"{self.url}/server_info", timeout=60).json()
        ours = [state.get("dflash") or {} for state in info["internal_states"]]
        steps, tokens = (
            sum(one.get(name, 0) for one in ours)
            for name in ("undrafted_steps", "undrafted_tokens")
        )
        return VerifySteps(steps, tokens)


@dataclass(frozen=True)
class OpenAI:
    """Any server of the OpenAI API, by /v1/completions; acceptance is vLLM's, from /metrics."""

    url: str
    model: str
    sampling: Sampling = GREEDY
    timeout_s: float = TIMEOUT_S

    def ask(self, prompt: Input, max_new_tokens: int, ignore_eos: bool) -> Answer:
        return self._stream(
            "/v1/completions",
            {"prompt": prompt},
            max_new_tokens,
            ignore_eos,
            lambda choice: choice.get("text"),
        )

    def _stream(
        self,
        path: str,
        what: dict[str, Any],
        max_new_tokens: int,
        ignore_eos: bool,
        text_of: Callable[[dict[str, Any]], str | None],
    ) -> Answer:
        body: dict[str, Any] = {
            "model": self.model, **what, "max_tokens": max_new_tokens, **self.sampling.fields(),
            "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        if ignore_eos:
            # An extension of OpenAI's API, so it is sent only if it is needed.
            body["ignore_eos"] = True
        clock, text, tokens = Clock(), "", 0
        for chunk in chunks(f"{self.url}{path}", body, self.timeout_s):
            for choice in chunk.get("choices") or ():
                piece = text_of(choice)
                if piece:
                    clock.arrived()
                    text += piece
            tokens = (chunk.get("usage") or {}).get("completion_tokens") or tokens
        if clock.first is None or not tokens:
            raise RequestFailed(
                f"{self.url}: an answer without text, or without `usage`, "
                "whose tokens cannot be counted"
            )
        began, first, gaps = clock.began, clock.first, tuple(clock.gaps)
        return Answer(text, None, tokens, first - began, clock.last - began, gaps_s=gaps)

    def flush(self) -> bool:
        """See `SGLang.flush`. vLLM can do so only in its development mode."""
        return requests.post(f"{self.url}/reset_prefix_cache", timeout=60).ok

    def counted(self) -> VerifySteps:
        """vLLM's count of verify steps so far, and of their tokens."""
        # prometheus_client reads its folder from the environment when it is imported, and servers
        # of tests are forked from processes that have imported this module.
        from prometheus_client.parser import text_string_to_metric_families

        response = requests.get(f"{self.url}/metrics", timeout=60)
        totals = {"drafts": 0, "accepted_tokens": 0}
        for family in text_string_to_metric_families(response.text) if response.ok else ():
            for sample in family.samples:
                name = sample.name.removeprefix("vllm:spec_decode_num_").removesuffix("_total")
                if name in totals and sample.name == f"vllm:spec_decode_num_{name}_total":
                    # A series per engine.
                    totals[name] += int(sample.value)
        return VerifySteps(totals["drafts"], totals["drafts"] + totals["accepted_tokens"])


@dataclass(frozen=True)
class OpenAIChat(OpenAI):
    """A server of the OpenAI API by /v1/chat/completions: a prompt is a user's message.

    `thinking` goes to the server's chat template. Reasoning counts as text of the answer.
    """

    thinking: bool = False

    def ask(self, prompt: Input, max_new_tokens: int, ignore_eos: bool) -> Answer:
        def text_of(choice: dict[str, Any]) -> str | None:
            delta = choice.get("delta") or {}
            return delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning")

        what = {
            "messages": [{"role": "user", "content": prompt}],
            "chat_template_kwargs": {"enable_thinking": self.thinking},
        }
        return self._stream("/v1/chat/completions", what, max_new_tokens, ignore_eos, text_of)


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


def arrivals(count: int, rate: float, seed: int) -> list[float]:
    """Seconds at which `count` requests are sent: a Poisson process of `rate` per second."""
    gaps = np.random.default_rng(seed).exponential(1 / rate, count)
    return [0.0, *np.cumsum(gaps)[:-1].tolist()]


def run(
    to: Endpoint,
    prompts: list[Prompt],
    concurrency: int,
    ask: Callable[[Endpoint, Prompt, list[str]], Answer],
    on_answer: Callable[[], Any] = lambda: None,
    sent_at_s: Sequence[float] | None = None,
) -> Pass:
    """Every prompt once, at most `concurrency` conversations at a time.

    Args:
        ask: sends the next turn of a prompt, given the answers to the turns before it.
        on_answer: called after every conversation.
        sent_at_s: earliest time to send each prompt, in seconds after the start and ascending;
            None sends as soon as a client is free.
    """

    def converse(prompt: Prompt) -> list[Answer]:
        answers: list[Answer] = []
        for _ in prompt.turns:
            answers.append(ask(to, prompt, [answer.text for answer in answers]))
        on_answer()
        return answers

    before, began = to.counted(), time.perf_counter()
    with ThreadPoolExecutor(concurrency) as pool:
        futures: list[Future[list[Answer]]] = []
        try:
            for prompt, at in zip(prompts, sent_at_s or [0.0] * len(prompts), strict=True):
                _wait_until(began + at, futures)
                futures.append(pool.submit(converse, prompt))
            answers = [future.result() for future in futures]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    seconds = time.perf_counter() - began
    by_answer = (of_answer(a.verify_steps, a.tokens) for turns in answers for a in turns)
    ours, by_server = sum(by_answer, VerifySteps()), to.counted() - before
    if ours.steps:
        return Pass(seconds, answers, ours - by_server)
    return Pass(seconds, answers, by_server, VLLMS if by_server.steps else OURS)


def _wait_until(moment: float, running: list[Future[list[Answer]]]) -> None:
    """Sleep until then. Raises what a request has failed with, instead of going on to the end."""
    delay = moment - time.perf_counter()
    if delay > 0:
        time.sleep(delay)
        for future in running:
            if future.done():
                future.result()
