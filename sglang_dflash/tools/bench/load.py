"""The client: streamed answers, their times, and a pass over the prompts."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import requests

from sglang_dflash.common.errors import Failed, innermost
from sglang_dflash.drafting.acceptance_length import VerifySteps, of_answer
from sglang_dflash.serving.metrics.server_info import NOT_KNOWN, ServerInfo
from sglang_dflash.tools.bench.compiled import compilations
from sglang_dflash.tools.bench.datasets import Input, Prompt

TIMEOUT_S = 600
GREEDY: Mapping[str, float] = {"temperature": 0}
# The label of a server whose requests are sampled: "on" where a seed decides all tokens.
SEEDED = "deterministic inference"


@dataclass(frozen=True)
class Answer:
    """One streamed answer.

    Attributes:
        ids: None if the server names none.
        tokens: number of new tokens.
        first_token_s: seconds from sending to the first token.
        seconds: seconds from sending to the end.
        verify_steps: 0 if the server counts none.
        chunks_at: when chunks with new tokens came, by `time.perf_counter`; empty if not recorded.
    """

    text: str
    ids: tuple[int, ...] | None
    tokens: int
    first_token_s: float
    seconds: float
    verify_steps: int = 0
    chunks_at: tuple[float, ...] = field(default=(), kw_only=True)

    @property
    def per_token_s(self) -> float | None:
        """Seconds per token after the first; None for a single token."""
        return (self.seconds - self.first_token_s) / (self.tokens - 1) if self.tokens > 1 else None


@dataclass(frozen=True)
class BenchPass:
    """All prompts answered once.

    Attributes:
        seconds: from the first request to the end of the last answer.
        answers: by prompt, then by turn.
        compilations: kernels that the server compiled in that time; None if it is not known.
    """

    seconds: float
    answers: list[list[Answer]]
    speculation: VerifySteps
    compilations: int | None = field(default=None, kw_only=True)

    @property
    def all_answers(self) -> list[Answer]:
        """All answers, by prompt, then by turn."""
        return [answer for turns in self.answers for answer in turns]

    @property
    def ids(self) -> list[tuple[int, ...] | None]:
        return [answer.ids for answer in self.all_answers]

    @property
    def tokens(self) -> int:
        return sum(answer.tokens for answer in self.all_answers)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


def send_request(method: str, url: str, **how: Any) -> requests.Response:
    """Return a response of any status. Raises Failed if there is none."""
    try:
        return requests.request(method, url, timeout=60, **how)
    except requests.RequestException as error:
        raise Failed(f"{url} cannot be reached: {innermost(error)}") from error


def chunks(
    url: str, body: dict[str, Any], timeout_s: float = TIMEOUT_S
) -> Iterator[dict[str, Any]]:
    """POST and yield the JSON objects of the event stream as they come. Raises Failed."""
    try:
        with requests.post(url, json=body, stream=True, timeout=timeout_s) as response:
            if not response.ok:
                raise Failed(f"{url}: status {response.status_code}, {response.text[:300]}")
            # Without chunked encoding a read waits until its buffer is full, and tokens come late.
            for line in response.iter_lines(chunk_size=512 if response.raw.chunked else 1):
                if line.startswith(b"data: {"):
                    chunk = json.loads(line[6:])
                    if "error" in chunk:
                        raise Failed(f"{url}: {chunk['error']}")
                    yield chunk
    except requests.RequestException as error:
        raise Failed(f"{url}: {error}") from error


@dataclass(frozen=True)
class SGLang:
    """An SGLang server by its own API, which names token ids and verify steps.

    `sampling`: SGLang's sampling parameters. `log`: its output, if it was started here.
    """

    SEED: ClassVar = "sampling_seed"

    url: str
    sampling: Mapping[str, float] = field(default_factory=lambda: GREEDY)
    timeout_s: float = TIMEOUT_S
    log: Path | None = None

    def ask(self, prompt: Input, max_new_tokens: int, ignore_eos: bool) -> Answer:
        """Stream one answer. Raises Failed."""
        ends = {"max_new_tokens": max_new_tokens, "ignore_eos": ignore_eos}
        body = {
            "text" if isinstance(prompt, str) else "input_ids": prompt,
            "sampling_params": {**self.sampling, **ends},
            "stream": True,
        }
        began, chunks_at = time.perf_counter(), list[float]()
        ids, text, meta = list[int](), "", dict[str, Any]()
        for chunk in chunks(f"{self.url}/generate", body, self.timeout_s):
            meta = chunk["meta_info"]
            if meta["completion_tokens"] > len(ids):
                chunks_at.append(time.perf_counter())
            # A chunk holds all tokens so far, or only new ones: a server flag decides. The first
            # chunk is both.
            is_cumulative = len(chunk["output_ids"]) == meta["completion_tokens"]
            ids = chunk["output_ids"] if is_cumulative else ids + chunk["output_ids"]
            # A server without a tokenizer sends none.
            piece = chunk.get("text", "")
            text = piece if is_cumulative else text + piece
        ended = time.perf_counter()
        reason = meta.get("finish_reason") or {}
        if reason.get("type") == "abort":
            raise Failed(f"{self.url}: the answer was ended: {reason.get('message')}")
        if not chunks_at or len(ids) != meta["completion_tokens"]:
            raise Failed(
                f"{self.url}: the stream holds {len(ids)} tokens of {meta.get('completion_tokens')}"
            )
        steps = meta.get("spec_verify_ct") or 0
        times = chunks_at[0] - began, ended - began
        return Answer(text, tuple(ids), len(ids), *times, steps, chunks_at=tuple(chunks_at))

    def flush(self) -> bool:
        """Empty the prefix cache, so that a prompt costs the same each time. Returns False if the
        server refuses."""
        return send_request("POST", f"{self.url}/flush_cache", params={"timeout": 30}).ok

    def info(self) -> ServerInfo:
        """Return the server's own /server_info."""
        return ServerInfo(send_request("GET", f"{self.url}/server_info").json())

    def describe(self) -> dict[str, str]:
        """Labels for a report, all of them read from the server."""
        report = self.info()
        paths = (report.info.get(key) for key in ("model_path", "speculative_draft_model_path"))
        labels = {"model": pair_label(*paths), "worker": report.set_up(), **report.machine()}
        if self.sampling["temperature"]:
            labels[SEEDED] = "on" if report.info.get("enable_deterministic_inference") else "off"
        return labels

    def count_steps(self) -> VerifySteps:
        """Count the steps without drafts so far: the counts of answers include them."""
        report = self.info()
        steps, tokens = map(report.values, ("undrafted_steps", "undrafted_tokens"))
        return VerifySteps(sum(steps), sum(tokens))

    def speculation(self, answers: list[Answer], counted: VerifySteps) -> VerifySteps:
        """Return the verify steps of a pass.

        Args:
            counted: the increase of `count_steps` during the pass.
        """
        return sum((of_answer(a.verify_steps, a.tokens) for a in answers), VerifySteps()) - counted


@dataclass(frozen=True)
class OpenAI:
    """Any server of the OpenAI API: texts and token ids by /v1/completions, messages by
    /v1/chat/completions.

    `sampling`: the API's sampling parameters. `thinking` goes to the server's chat template.
    """

    SEED: ClassVar = "seed"
    # Fields of a request beyond the API.
    MORE: ClassVar[Mapping[str, Any]] = {}

    url: str
    model: str
    sampling: Mapping[str, float] = field(default_factory=lambda: GREEDY)
    timeout_s: float = TIMEOUT_S
    log: ClassVar[Path | None] = None
    thinking: bool = False

    def ask(self, prompt: Input, max_new_tokens: int, ignore_eos: bool) -> Answer:
        """Stream one answer; reasoning counts as its text. Raises Failed."""
        path, prompt_fields = "/v1/completions", dict[str, Any](prompt=prompt)
        if isinstance(prompt[0], dict):
            path = "/v1/chat/completions"
            thinking = {"enable_thinking": self.thinking}
            prompt_fields = {"messages": prompt, "chat_template_kwargs": thinking}
        if ignore_eos:
            # This field is an extension of the API, so it is sent only if it is needed.
            prompt_fields["ignore_eos"] = True
        body = {
            "model": self.model,
            **prompt_fields,
            **self.MORE,
            **self.sampling,
            "max_tokens": max_new_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        began, first_token_at, last_token_at = time.perf_counter(), None, 0.0
        text, ids, tokens = "", list[int](), 0
        for chunk in chunks(f"{self.url}{path}", body, self.timeout_s):
            for choice in chunk.get("choices") or ():
                piece, new = _text(choice), choice.get("token_ids") or []
                if piece or new:
                    last_token_at = time.perf_counter()
                    first_token_at = first_token_at or last_token_at
                    text, ids = text + piece, ids + new
            tokens = (chunk.get("usage") or {}).get("completion_tokens") or tokens
        if first_token_at is None or not tokens:
            raise Failed(
                f"{self.url}: an answer without text, or without `usage`, "
                "whose tokens cannot be counted"
            )
        named = tuple(ids) if len(ids) == tokens else None
        return Answer(text, named, tokens, first_token_at - began, last_token_at - began)

    def flush(self) -> bool:
        """See `SGLang.flush`. vLLM can do so only in its development mode."""
        return send_request("POST", f"{self.url}/reset_prefix_cache").ok

    def describe(self) -> dict[str, str]:
        """See `SGLang.describe`. The API tells the model's name only."""
        labels = {"model": self.model, "worker": NOT_KNOWN, **ServerInfo({}).machine()}
        return labels | ({SEEDED: NOT_KNOWN} if self.sampling["temperature"] else {})

    def count_steps(self) -> VerifySteps:
        """Return no steps: the API does not count them."""
        return VerifySteps()

    def speculation(self, answers: list[Answer], counted: VerifySteps) -> VerifySteps:
        """See `SGLang.speculation`."""
        return counted


@dataclass(frozen=True)
class VLLM(OpenAI):
    """A server of vLLM, which names token ids, and counts drafts in /metrics."""

    MORE: ClassVar[Mapping[str, Any]] = {"return_token_ids": True}

    def count_steps(self) -> VerifySteps:
        """Count verify steps so far. vLLM's count includes tokens that no request keeps."""
        page = send_request("GET", f"{self.url}/metrics").text

        def of(series: str) -> int:
            named = rf"^vllm:spec_decode_num_{series}_total(?:{{.*}})? (\S+)$"
            return sum(int(float(value)) for value in re.findall(named, page, re.M))

        drafts = of("drafts")
        return VerifySteps(drafts, drafts + of("accepted_tokens"))

    def describe(self) -> dict[str, str]:
        """See `SGLang.describe`. All labels are known in vLLM's development mode only."""
        labels = super().describe()
        version = send_request("GET", f"{self.url}/version")
        if version.ok:
            labels["engine"] = f"vLLM {version.json()['version']}"
        report = send_request("GET", f"{self.url}/server_info", params={"config_format": "json"})
        if not report.ok:
            return labels
        config, machine = report.json()["vllm_config"], report.json()["system_env"]
        served, drafts = config["model_config"], config["speculative_config"]
        worker = "plain decoding"
        if drafts is not None:
            worker = f"{drafts['method']}, {drafts['num_speculative_tokens']} drafts per step"
        return {
            **labels,
            "model": pair_label(served["model"], drafts and drafts["model"]),
            "worker": worker,
            "dtype": served["dtype"].removeprefix("torch."),
            "device": _device(machine),
            "torch": machine["torch_version"],
        }


def pair_label(target: str | None, draft: str | None) -> str:
    """The names of a pair for a report."""
    # A hub name has two parts. The first parts of a folder's path tell nothing to others.
    names = ["/".join(Path(path).parts[-2:]) for path in (target, draft) if path]
    return " with draft ".join(names) or NOT_KNOWN


def _device(machine: Mapping[str, Any]) -> str:
    """Return the device of a server of vLLM, by its report of the system."""
    if machine["nvidia_gpu_models"]:
        return machine["nvidia_gpu_models"].splitlines()[0]
    lines = (line.partition(":") for line in (machine["cpu_info"] or "").splitlines())
    cpu_facts = {name.strip(): value.strip() for name, _, value in lines}
    if not cpu_facts:
        return NOT_KNOWN
    return f"CPU, {cpu_facts.get('CPU(s)')} cores of {cpu_facts.get('Model name')}"


def _text(choice: dict[str, Any]) -> str:
    """Return the text that a choice of a completion or of a chat adds to the answer."""
    delta = choice.get("delta") or choice
    keys = ("text", "content", "reasoning_content", "reasoning")
    return next((delta[key] for key in keys if delta.get(key)), "")


Endpoint = SGLang | OpenAI


def endpoint(url: str) -> Endpoint:
    """Return the endpoint of the server at a URL, by its kind.

    Raises:
        Failed: neither kind answers, or our worker simulates its acceptance.
    """
    url = (url if "://" in url else f"http://{url}").rstrip("/").removesuffix("/v1")
    try:
        response = send_request("GET", f"{url}/server_info")
        if response.ok and "internal_states" in response.json():
            length = ServerInfo(response.json()).least("simulated_acceptance")
            if length:
                raise Failed(
                    f"{url}: simulates an acceptance of {length:g}; "
                    "restart it without SGLANG_SIMULATE_ACC_LEN"
                )
            return SGLang(url)
        models = send_request("GET", f"{url}/v1/models")
        if models.status_code in (401, 403):
            why = "it asks for an API key, and none is sent; start it without --api-key"
            raise Failed(f"{url} answers {models.status_code}: {why}")
        models.raise_for_status()
        model = models.json()["data"][0]
        return (VLLM if model.get("owned_by") == "vllm" else OpenAI)(url, model["id"])
    except (requests.RequestException, LookupError, TypeError) as error:
        raise Failed(
            f"{url}: neither SGLang nor a server of the OpenAI API "
            f"({type(error).__name__}: {error})"
        ) from error


def run(
    server: Endpoint,
    prompts: list[Prompt],
    concurrency: int,
    ask: Callable[[Endpoint, Prompt, list[str]], Answer],
    on_answer: Callable[[], Any] = lambda: None,
) -> BenchPass:
    """Send every prompt once, at most `concurrency` conversations at a time.

    Args:
        ask: sends the next turn of a prompt, given the answers to the turns before it.
        on_answer: called after every conversation.
    """

    def converse(prompt: Prompt) -> list[Answer]:
        answers: list[Answer] = []
        for _ in prompt.turns:
            answers.append(ask(server, prompt, [answer.text for answer in answers]))
        on_answer()
        return answers

    compiled, before, began = compilations(server.log), server.count_steps(), time.perf_counter()
    with ThreadPoolExecutor(concurrency) as pool:
        # The first failure cancels conversations that have not begun.
        answers = list(pool.map(converse, prompts))
    seconds = time.perf_counter() - began
    all_answers = [answer for turns in answers for answer in turns]
    steps = server.speculation(all_answers, server.count_steps() - before)
    return BenchPass(seconds, answers, steps, compilations=compilations(server.log, compiled))
