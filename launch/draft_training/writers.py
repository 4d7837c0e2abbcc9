"""Writers of text: the target in this process, or SGLang servers of it."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import requests
from transformers import PreTrainedModel

from .decoding import DecodingJob, Nucleus, write
from .device import now

# Texts that Transformers decodes at a time.
ROWS = {"cpu": 256, "cuda": 1024}
# Texts of one HTTP request, and its timeout.
ASKED, TIMEOUT_S = 1024, 1800
# Servers work on other shards while a shard waits for its longest texts.
SHARDS_AT_A_TIME = 4


class Writer(Protocol):
    """Continues texts.

    Attributes:
        shards_at_a_time: threads that may call `write`.
    """

    shards_at_a_time: int

    def now(self) -> float:
        """Return seconds by the clock that measures the writer's work."""

    def write(
        self, jobs: list[DecodingJob], ends: Collection[int], nucleus: Nucleus, loop_tokens: int
    ) -> None:
        """Continue all jobs; see `decoding.write`."""


class TransformersWriter:
    """A writer in this process. `target`: as `decoding.fast_decoding` returns it."""

    shards_at_a_time = 1

    def __init__(self, target: PreTrainedModel) -> None:
        self.target = target

    def now(self) -> float:
        return now(self.target.device)

    def write(
        self, jobs: list[DecodingJob], ends: Collection[int], nucleus: Nucleus, loop_tokens: int
    ) -> None:
        rows = ROWS[self.target.device.type]
        write(self.target, jobs, ends, rows=rows, nucleus=nucleus, loop_tokens=loop_tokens)


class ServerWriter:
    """SGLang servers of the target, which serve without a draft.

    A server sorts the logits of all texts of a batch if one of them is sampled. The first of
    several servers therefore gets the greedy texts, and the others share the sampled ones. Samples
    have no seed, so a shard that is written again differs.
    """

    shards_at_a_time = SHARDS_AT_A_TIME

    def __init__(self, urls: Sequence[str]) -> None:
        self.greedy, *sampled = (url.rstrip("/") for url in urls)
        self.sampled = sampled or [self.greedy]

    def now(self) -> float:
        # The CPU time of this process says nothing about servers.
        return time.monotonic()

    def write(
        self, jobs: list[DecodingJob], ends: Collection[int], nucleus: Nucleus, loop_tokens: int
    ) -> None:
        """See `Writer.write`. Raises ValueError if a server does not answer."""
        greedy = [job for job in jobs if not job.sampled]
        sampled = [job for job in jobs if job.sampled]
        parts = [(self.greedy, greedy[i : i + ASKED]) for i in range(0, len(greedy), ASKED)]
        for i in range(0, len(sampled), ASKED):
            url = self.sampled[i // ASKED % len(self.sampled)]
            parts.append((url, sampled[i : i + ASKED]))
        with ThreadPoolExecutor(max(1, len(parts))) as pool:
            for _ in pool.map(lambda part: ask(*part, ends, nucleus), parts):
                pass
        for job in jobs:
            job.look_for_loop(loop_tokens)


def ask(url: str, jobs: Sequence[DecodingJob], ends: Collection[int], nucleus: Nucleus) -> None:
    """Let a server continue some jobs in one request. Raises ValueError."""
    sampling = {"temperature": nucleus.temperature, "top_p": nucleus.mass}
    parameters: list[dict[str, Any]] = [
        {
            **(sampling if job.sampled else {"temperature": 0}),
            "max_new_tokens": job.limit,
            "stop_token_ids": sorted(ends),
        }
        for job in jobs
    ]
    body = {"input_ids": [job.prompt for job in jobs], "sampling_params": parameters}
    try:
        response = requests.post(f"{url}/generate", json=body, timeout=TIMEOUT_S)
    except requests.RequestException as error:
        raise ValueError(f"{url}: {error}") from error
    if not response.ok:
        raise ValueError(f"{url}: status {response.status_code}, {response.text[:300]}")
    for job, answer in zip(jobs, response.json(), strict=True):
        for token in answer["output_ids"]:
            job.add(token, ends)
