"""Mixed traffic against one server, checked token by token.

Seeded: the clients of two runs send the same requests, each in its own order; which of them meet
depends on how fast they are answered.
"""

from __future__ import annotations

import json
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import psutil
import requests

from sglang_dflash.tools.bench.server import Server
from tests.reliability.corpus import GRAMMAR_TOKENS, Expected

# How often a client does what: a method of `Client`.
WEIGHTS = {
    "greedy": 8,
    "streamed": 4,
    "grammar": 4,
    "logprobs": 2,
    "sampled": 5,
    "hang_up": 3,
    "abort": 2,
}
SAMPLING: tuple[dict[str, Any], ...] = (
    {"temperature": 0.8},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 1.2, "top_k": 20},
    {"temperature": 0.7, "min_p": 0.05, "frequency_penalty": 0.3},
)
# Log-probabilities of one token may differ by the order of sums.
LOGPROB = 1e-3
VOCABULARY = 1024
# Seconds. 32 clients share some 100 tokens per second: one answer of 500 tokens takes minutes.
PATIENCE = 600


@dataclass
class Found:
    """Results of the requests.

    Attributes:
        requests: by kind.
        tokens: of all answers.
        ties: greedy answers that left plain decoding's at two equal logits.
        wrong: answers that are not what they should be.
        failed: requests without an answer.
        rss: bytes of the scheduler process whenever the server was idle.
        in_use: of the scheduler at the same times, see `watched.memory_in_use`.
        retractions: of the requests that were answered.
    """

    requests: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    ties: int = 0
    wrong: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    rss: list[int] = field(default_factory=list)
    in_use: list[dict[str, int]] = field(default_factory=list)
    retractions: int = 0

    def summary(self) -> dict[str, Any]:
        """Return the results for a report."""
        return {
            "requests": sum(self.requests.values()),
            "by_kind": dict(sorted(self.requests.items())),
            "tokens": self.tokens,
            "wrong": len(self.wrong),
            "ties": self.ties,
            "failed": len(self.failed),
            "retractions": self.retractions,
            "rss_mib": [round(rss / 2**20, 1) for rss in self.rss],
            "malloc_mib": [round(one["malloc_bytes"] / 2**20, 1) for one in self.in_use],
            "python_blocks": [one["python_blocks"] for one in self.in_use],
        }


class Client:
    """One client: sends requests of random kinds, one after another."""

    def __init__(self, server: Server, expected: Sequence[Expected], seed: int) -> None:
        self.found = Found()
        self._url, self._name = server.url, f"soak-{seed}"
        self._free = [e for e in expected if e.sampling.get("ignore_eos")]
        self._bound = [e for e in expected if not e.sampling.get("ignore_eos")]
        self._random = random.Random(seed)
        self._sent = 0

    def send(self) -> None:
        """One request, and its check."""
        (kind,) = self._random.choices([*WEIGHTS], [*WEIGHTS.values()])
        if self._sent == 0:
            # However slow the machine, there are some: half of them end inside a block.
            kind = "grammar"
        self.found.requests[kind] += 1
        self._sent += 1
        try:
            getattr(self, f"_{kind}")()
        except requests.RequestException as error:
            self.found.failed.append(f"{kind}: {type(error).__name__}: {str(error)[:200]}")

    def _greedy(self) -> None:
        one = self._pick(self._free)
        asked = self._random.randint(1, len(one.tokens))
        self._check(one, self._post(self._body(one, asked)), asked)

    def _streamed(self) -> None:
        one = self._pick(self._free)
        asked = self._random.randint(1, len(one.tokens))
        answer: dict[str, Any] = {}
        with self._stream(self._body(one, asked)) as events:
            for event in events:
                answer = event
        self._check(one, answer, asked)

    def _grammar(self) -> None:
        one = self._pick(self._bound)
        # All of it, so that it ends where the grammar does.
        answer = self._post(self._body(one, GRAMMAR_TOKENS))
        self._check(one, answer, GRAMMAR_TOKENS)

    def _logprobs(self) -> None:
        one = self._pick(self._free)
        asked = self._random.randint(1, len(one.tokens))
        more = {"return_logprob": True, "logprob_start_len": -1, "top_logprobs_num": 2}
        answer = self._post({**self._body(one, asked), **more})
        if not self._check(one, answer, asked):
            return
        got = [value for value, *_ in answer["meta_info"]["output_token_logprobs"]]
        pairs = zip(got, one.logprobs, strict=False)
        if len(got) != asked or any(abs(a - b) > LOGPROB for a, b in pairs):
            self.found.wrong.append(f"log-probabilities of {asked} tokens")

    def _sampled(self) -> None:
        one, asked = self._pick(self._free), self._random.randint(1, 48)
        how = self._pick(SAMPLING)
        body = self._body(one, asked)
        body["sampling_params"] |= how
        answer = self._post(body)
        tokens = self._count(answer)
        if len(tokens) != asked or not all(0 <= token < VOCABULARY for token in tokens):
            self.found.wrong.append(f"sampled: {len(tokens)} tokens of {asked}")

    def _hang_up(self) -> None:
        one = self._pick(self._free)
        events_wanted = self._random.randint(0, 3)
        answer: dict[str, Any] = {}
        with self._stream(self._body(one, len(one.tokens))) as events:
            for _, event in zip(range(events_wanted), events, strict=False):
                answer = event
        if answer:
            self._check(one, answer, len(one.tokens), whole=False)

    def _abort(self) -> None:
        one = self._pick(self._free)
        rid, answer = f"{self._name}-{self._sent}", {}
        with self._stream({**self._body(one, len(one.tokens)), "rid": rid}) as events:
            for count, event in enumerate(events):
                answer = event
                if count == 0:
                    self._call("abort_request", {"rid": rid})
        ended = answer["meta_info"]["finish_reason"]["type"]
        self._check(one, answer, len(one.tokens), whole=ended != "abort")

    def _pick(self, some: Sequence[Any]) -> Any:
        return self._random.choice(some)

    def _body(self, one: Expected, asked: int) -> dict[str, Any]:
        sampling = {"temperature": 0, **one.sampling, "max_new_tokens": asked}
        return {"input_ids": one.prompt, "sampling_params": sampling}

    def _call(self, path: str, body: dict[str, Any]) -> requests.Response:
        answer = requests.post(f"{self._url}/{path}", json=body, timeout=PATIENCE)
        answer.raise_for_status()
        return answer

    def _post(self, body: dict[str, Any]) -> dict[str, Any]:
        return self._call("generate", body).json()

    @contextmanager
    def _stream(self, body: dict[str, Any]) -> Iterator[Iterator[dict[str, Any]]]:
        """The events of a streamed answer. To leave it early hangs up."""
        with requests.post(
            f"{self._url}/generate", json={**body, "stream": True}, stream=True, timeout=PATIENCE
        ) as response:
            response.raise_for_status()
            lines = response.iter_lines()
            yield (json.loads(line[6:]) for line in lines if line.startswith(b"data: {"))

    def _count(self, answer: dict[str, Any]) -> list[int]:
        self.found.tokens += len(answer["output_ids"])
        self.found.retractions += answer["meta_info"].get("num_retractions") or 0
        return answer["output_ids"]

    def _check(self, one: Expected, answer: dict[str, Any], asked: int, whole: bool = True) -> bool:
        """Return whether a greedy answer is plain decoding's; note a tie or an error."""
        if "output_ids" not in answer:
            self.found.wrong.append(f"no answer: {str(answer)[:200]}")
            return False
        got = self._count(answer)
        at = one.differs_at(got, whole, asked)
        if at is None:
            return True
        if one.is_tie(at):
            self.found.ties += 1
            return False
        self.found.wrong.append(
            f"prompt of {len(one.prompt)} tokens, {one.sampling}: from token {at} of {len(got)} "
            f"({asked} asked): {got[at : at + 4]}, not {one.tokens[at : at + 4]}"
        )
        return False


class Traffic:
    """Clients side by side, and an operator who flushes, pauses and continues."""

    def __init__(
        self, server: Server, expected: Sequence[Expected], clients: int, seed: int = 0
    ) -> None:
        self._server = server
        self._clients = [Client(server, expected, 1000 * seed + i) for i in range(clients)]
        self._random = random.Random(seed)
        self._goes_on, self._ended = threading.Event(), threading.Event()
        self._operator: Counter[str] = Counter()
        self._rss: list[int] = []
        self._in_use: list[dict[str, int]] = []
        self._busy = 0
        self._lock = threading.Condition()

    def run(self, seconds: float, each: float, scheduler: psutil.Process, idle: Any) -> Found:
        """Send requests for so long.

        Args:
            each: every so many seconds the clients wait until the server is idle.
            scheduler: the process whose memory is noted then.
            idle: called then.
        """
        threads = [threading.Thread(target=self._loop, args=(one,)) for one in self._clients]
        self._goes_on.set()
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + seconds
        try:
            while time.monotonic() < deadline and self._server.process.poll() is None:
                self._operate(min(each, max(0.0, deadline - time.monotonic())))
                self._wait_for_idle()
                idle()
                self._rss.append(scheduler.memory_info().rss)
                self._in_use.append(self._server.dflash()["memory_in_use"])
                self._goes_on.set()
        finally:
            self._ended.set()
            self._goes_on.set()
            for thread in threads:
                thread.join()
        return self._found()

    def _loop(self, client: Client) -> None:
        while True:
            self._goes_on.wait()
            if self._ended.is_set():
                return
            with self._lock:
                self._busy += 1
            try:
                client.send()
            finally:
                with self._lock:
                    self._busy -= 1
                    self._lock.notify_all()

    def _wait_for_idle(self) -> None:
        """No client sends anything."""
        self._goes_on.clear()
        with self._lock:
            self._lock.wait_for(lambda: self._busy == 0)

    def _operate(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            time.sleep(min(self._random.uniform(0.5, 2.5), max(0.0, until - time.monotonic())))
            what = self._random.choice(["flush", "retract", "in_place"])
            self._operator[what] += 1
            if what == "flush":
                # Refused while requests run.
                requests.post(f"{self._server.url}/flush_cache", timeout=PATIENCE)
                continue
            try:
                self._control("pause_generation", {"mode": what})
                time.sleep(self._random.uniform(0.05, 0.3))
            finally:
                # After Ctrl-C, too: the clients wait for their answers.
                self._control("continue_generation", {})

    def _control(self, path: str, body: dict[str, Any]) -> None:
        answer = requests.post(f"{self._server.url}/{path}", json=body, timeout=PATIENCE)
        answer.raise_for_status()

    def _found(self) -> Found:
        total = Found(rss=self._rss, in_use=self._in_use)
        total.requests.update({f"operator: {name}": n for name, n in self._operator.items()})
        for client in self._clients:
            total.requests.update(client.found.requests)
            total.tokens += client.found.tokens
            total.ties += client.found.ties
            total.retractions += client.found.retractions
            total.wrong += client.found.wrong
            total.failed += client.found.failed
        return total
