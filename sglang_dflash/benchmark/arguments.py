"""Flags of the published benchmark command, with their published names and defaults.

Loads without torch, for `--help`.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from sglang_dflash.bench.datasets import BUILT_IN, NAMES, check_name, default_cache
from sglang_dflash.facts.errors import ConfigError
from sglang_dflash.transformers_loop.arguments import DTYPES

SERVERS = ("sglang", "vllm")
BACKENDS = (*SERVERS, "transformers")
BASE_URL, NUM_PROMPTS, CONCURRENCY, MAX_NEW_TOKENS = "http://127.0.0.1:30000", 1024, 1, 2048
TIMEOUT_S = 3600

# Flags that only some backends read.
_READ_BY = {
    "base_url": SERVERS,
    "timeout_s": SERVERS,
    "concurrency": SERVERS,
    "draft_model": ("transformers",),
    "block_size": ("transformers",),
    "draft_sliding_window_size": ("transformers",),
    "max_samples": ("transformers",),
    "dtype": ("transformers",),
    "device": ("transformers",),
}


@dataclass(frozen=True)
class Settings:
    """One benchmark. None is a flag that was not given.

    Attributes:
        model: the target: a folder or a hub name. With vllm, the name that the server serves.
        dataset: the name of a data set; None if there is a `dataset_file`.
        num_prompts: measured prompts; with transformers a limit, as `max_samples` is.
        seed: of the choice of prompts, and of sampling.

    Raises:
        ConfigError: a value is out of range, or two do not go together.
    """

    backend: str
    model: str
    dataset: str | None = None
    dataset_file: str | None = None
    cache_dir: str | None = None
    base_url: str | None = None
    num_prompts: int | None = None
    concurrency: int | None = None
    timeout_s: float | None = None
    draft_model: str | None = None
    block_size: int | None = None
    draft_sliding_window_size: int | None = None
    max_samples: int | None = None
    dtype: str | None = None
    device: str | None = None
    max_new_tokens: int = MAX_NEW_TOKENS
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int | None = None
    seed: int = 0
    enable_thinking: bool = False
    output_file: str | None = None

    def __post_init__(self) -> None:
        if (self.dataset is None) == (self.dataset_file is None):
            raise ConfigError("--dataset and --dataset-file: one of the two is required")
        if self.dataset is not None:
            check_name(self.dataset)
        for name in ("num_prompts", "concurrency", "timeout_s", "max_samples", "max_new_tokens"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"{_flag(name)}: {value}; a positive number is required")
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ConfigError(
                f"--temperature: {self.temperature}; 0 (greedy) or a positive number is required"
            )
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"--top-p: {self.top_p}; a number above 0 and up to 1 is required")
        if self.top_k is not None and self.top_k < 1:
            raise ConfigError(f"--top-k: {self.top_k}; a positive number of tokens is required")
        if not 0 <= self.seed < 2**31:
            raise ConfigError(f"--seed: {self.seed}; a number from 0 to 2**31 - 1 is required")
        if self.backend == "transformers" and self.draft_model is None:
            raise ConfigError(
                "--draft-model: missing; --backend transformers needs the draft of "
                f"{self.model!r}, a folder or a hub name"
            )
        if self.base_url is not None and not self.base_url.startswith(("http://", "https://")):
            raise ConfigError(f"--base-url: {self.base_url!r}; http://HOST:PORT is required")

    @property
    def cache(self) -> Path:
        """Folder of fetched data sets."""
        return Path(self.cache_dir) if self.cache_dir else default_cache()

    @property
    def source(self) -> str:
        """The data set's name, or its file's."""
        return self.dataset or Path(self.dataset_file or "").stem


def without_effect(settings: Settings) -> list[str]:
    """A line for every flag that was given and changes nothing."""
    lines = [
        f"{_flag(name)} has no effect with --backend {settings.backend}"
        for name, backends in _READ_BY.items()
        if getattr(settings, name) is not None and settings.backend not in backends
    ]
    if settings.enable_thinking and settings.dataset in BUILT_IN:
        lines.append(
            f"--enable-thinking has no effect on {settings.dataset}: its prompts are texts to "
            "continue, without a chat template"
        )
    low = settings.model.lower()
    if settings.enable_thinking and any(name in low for name in ("qwen3-4b", "qwen3-8b")):
        lines.append(
            f"--enable-thinking: the published drafts of Qwen3-4B and Qwen3-8B were not trained on "
            f"thinking; expect short acceptance lengths for {settings.model}"
        )
    return lines


def parse(argv: Sequence[str] | None = None) -> Settings:
    """From the command line; exits with status 2 on an unknown flag or backend.

    Raises:
        ConfigError: see `Settings`.
    """
    parser = argparse.ArgumentParser(
        prog="python -m sglang_dflash.benchmark",
        description="Throughput and acceptance length of a running server, or of a pair over "
        "Transformers (torchrun shares the prompts out over ranks).",
    )
    _add_inputs(parser)
    _add_for_servers(parser)
    _add_for_transformers(parser)
    _add_sampling(parser)
    given = vars(parser.parse_args(argv))
    names = {f.name for f in fields(Settings)}
    return Settings(**{k: v for k, v in given.items() if k in names and v is not None})


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _add_inputs(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--backend", choices=BACKENDS, required=True)
    add("--model", required=True, help="the target: a folder or a hub name")
    add("--dataset", "--dataset-name", metavar="NAME", help=", ".join(NAMES))
    add(
        "--dataset-file",
        metavar="JSONL",
        help='instead: lines {"prompt": TEXT}, or {"turns": [TEXT, ...]} for the chat template',
    )
    add("--cache-dir", help="folder of fetched data sets")
    add(
        "--num-prompts",
        type=int,
        help=f"measured prompts (default: {NUM_PROMPTS} for servers, which get them over and over "
        "if the data set has fewer; all for transformers)",
    )
    add("--output-file", metavar="JSON", help="also write figures and answers to this file")


def _add_for_servers(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("for sglang and vllm").add_argument
    add("--base-url", metavar="URL", help=f"of the running server (default: {BASE_URL})")
    add(
        "--concurrency",
        "--max-concurrency",
        type=int,
        help=f"requests at a time (default: {CONCURRENCY})",
    )
    add("--timeout-s", type=float, help=f"of a request (default: {TIMEOUT_S})")


def _add_for_transformers(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("for transformers").add_argument
    add("--draft-model", metavar="D", help="a folder or a hub name")
    add("--max-samples", type=int, help="prompts at most (default: all)")
    add("--block-size", type=int, help="tokens verified per step (default: the draft's)")
    add(
        "--draft-sliding-window-size",
        type=int,
        metavar="W",
        help="committed tokens that the draft attends to (default: all)",
    )
    add("--dtype", choices=DTYPES, help="default: float32 on a CPU, bfloat16 elsewhere")
    add("--device", help="as torch names it (default: a GPU per rank, or cpu)")


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    default: dict[str, Any] = {f.name: f.default for f in fields(Settings)}
    add("--max-new-tokens", type=int, help=f"default: {MAX_NEW_TOKENS}")
    add("--temperature", type=float, help="0 is greedy (default)")
    add("--top-p", type=float, help=f"default: {default['top_p']}")
    add("--top-k", type=int, help="default: all tokens")
    add("--seed", type=int, help="of the choice of prompts and of sampling (default: 0)")
    add(
        "--enable-thinking",
        action="store_true",
        help="of the chat template, which is told not to think otherwise",
    )
