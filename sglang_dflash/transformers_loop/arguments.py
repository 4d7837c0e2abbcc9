"""Arguments of `sglang-dflash generate`: defaults and checks. Loads without torch, for `--help`."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from sglang_dflash.drafting.options import Options
from sglang_dflash.facts.errors import ConfigError

DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class GenerateArgs:
    """A prompt and how to continue it. Errors name the command's flags.

    Attributes:
        target, draft: folders or hub names.
        prompt: the text; with `chat`, a user's message for the chat template.
        max_new_tokens: generated tokens at most.
        temperature: 0 is greedy.
        top_p: probability mass that is kept.
        top_k: tokens that are kept; 0 keeps all.
        seed: of the sampling; None for a random one.
        options: block size and context window.
        dtype: one of `DTYPES`; None for float32 on a CPU, bfloat16 elsewhere.
        device: as torch names it; None for the first GPU, or the CPU.

    Raises:
        ConfigError: a value is out of range.
    """

    target: str
    draft: str
    prompt: str
    chat: bool = False
    max_new_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    options: Options = field(default_factory=Options)
    dtype: str | None = None
    device: str | None = None

    def __post_init__(self) -> None:
        if not self.prompt:
            raise ConfigError("--prompt: empty; give at least one character to continue")
        if self.max_new_tokens < 1:
            raise ConfigError(
                f"--max-new-tokens: {self.max_new_tokens}; a positive number of tokens is required"
            )
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ConfigError(
                f"--temperature: {self.temperature}; 0 (greedy) or a positive number is required"
            )
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"--top-p: {self.top_p}; a number above 0 and up to 1 is required")
        if self.top_k < 0:
            raise ConfigError(
                f"--top-k: {self.top_k} is negative; 0 keeps all tokens, or give how many to keep"
            )
        if self.seed is not None and not 0 <= self.seed < 2**63:
            raise ConfigError(f"--seed: {self.seed}; a number from 0 to 2**63 - 1 is required")
        if self.dtype is not None and self.dtype not in DTYPES:
            raise ConfigError(f"--dtype: {self.dtype!r}; choose one of {', '.join(DTYPES)}")
