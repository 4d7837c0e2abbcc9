"""Measure a running server: output tokens per second and time per verify step.

Loads without `requests` and SGLang: the hardware card is also written on bare machines.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from sglang_dflash.drafting.acceptance_length import VerifySteps

if TYPE_CHECKING:
    from sglang_dflash.bench.server import Server


class Run(NamedTuple):
    """One pass over the prompts.

    `verify_steps`: target forwards per request, summed; one per token in plain decoding.
    """

    tokens: int
    seconds: float
    verify_steps: int
    concurrency: int
    outputs: list[list[int]]

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def counts(self) -> VerifySteps:
        """For an acceptance length: the first token of each answer is the prefill's."""
        return VerifySteps(self.verify_steps, self.tokens - len(self.outputs))

    @property
    def step_ms(self) -> float:
        """Mean time between a request's verify steps, prefill included, in milliseconds."""
        return 1000 * self.seconds * self.concurrency / self.verify_steps


def run(server: Server, prompts: list[str], concurrency: int, new_tokens: int) -> Run:
    """Generate exactly `new_tokens` after each prompt, greedy, `concurrency` requests at a time."""

    def one(prompt: str) -> dict[str, Any]:
        return server.generate(prompt, temperature=0, max_new_tokens=new_tokens, ignore_eos=True)

    began = time.perf_counter()
    with ThreadPoolExecutor(concurrency) as pool:
        answers = list(pool.map(one, prompts))
    seconds = time.perf_counter() - began
    tokens = sum(a["meta_info"]["completion_tokens"] for a in answers)
    steps = sum(
        a["meta_info"].get("spec_verify_ct") or a["meta_info"]["completion_tokens"] for a in answers
    )
    return Run(tokens, seconds, steps, concurrency, [a["output_ids"] for a in answers])


def hardware() -> dict[str, Any]:
    """Date, processor, cores, memory, accelerator and versions; None for what is not there."""
    import torch

    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    models = [
        line.split(":", 1)[1].strip() for line in info.splitlines() if line.startswith("model name")
    ]
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "processor": models[0] if models else platform.processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "sglang": _version("sglang"),
        "torch": _version("torch"),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
