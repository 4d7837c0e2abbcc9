"""`sglang-dflash generate`: continue one prompt over Transformers, as a stream."""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import sys
import time
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_dflash.drafting.options import Options
from sglang_dflash.facts.command_line import add_flags, given, setting
from sglang_dflash.facts.embedded import demo_pair
from sglang_dflash.facts.errors import ConfigError

if TYPE_CHECKING:
    from sglang_dflash.transformers_loop import LoadedPair


@dataclass(frozen=True)
class GenerateSettings:
    """A prompt and how to continue it.

    Raises:
        ConfigError: a value is out of range.
    """

    target: str | None = setting(
        None, "a folder or a hub name (default: the embedded dense pair's)"
    )
    draft: str | None = setting(None, "a folder or a hub name (default: the embedded dense pair's)")
    prompt: str | None = setting(None, "the text to continue")
    prompt_file: str | None = setting(None, "a file that holds it; - for standard input")
    chat: bool = setting(False, "the prompt is a user's message: apply the chat template")
    max_new_tokens: int = setting(128, "default: {default}")
    temperature: float = setting(0.0, "0 is greedy (default)")
    top_p: float = setting(1.0, "keep the likeliest tokens of this mass (default: {default})")
    top_k: int = setting(0, "keep this many of the likeliest tokens; 0 keeps all (default)")
    seed: int | None = setting(None, "of the sampling (default: a new one)")
    block_size: int | None = setting(None, "tokens verified per step (default: the draft's)")
    window: int | None = setting(None, "committed tokens that the draft attends to (default: all)")
    dtype: str | None = setting(
        None, "float32, bfloat16 or float16 (default: float32 on a CPU, bfloat16 elsewhere)"
    )
    device: str | None = setting(None, "as torch names it (default: the first GPU, or cpu)")

    def __post_init__(self) -> None:
        if (self.target is None) != (self.draft is None):
            raise ConfigError(
                "target",
                self.target,
                "give {target} and {draft}, or neither for the embedded dense pair",
            )
        if self.max_new_tokens < 1:
            raise ConfigError("max_new_tokens", self.max_new_tokens, "at least 1 is required")
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ConfigError("temperature", self.temperature, "0 (greedy) or a positive number")
        if not 0 < self.top_p <= 1:
            raise ConfigError("top_p", self.top_p, "a number above 0 and up to 1 is required")
        if self.top_k < 0:
            raise ConfigError("top_k", self.top_k, "0, or how many tokens to keep, is required")
        if self.seed is not None and not 0 <= self.seed < 2**63:
            raise ConfigError("seed", self.seed, "a number from 0 to 2**63 - 1 is required")

    @property
    def options(self) -> Options:
        return Options(block_size=self.block_size, window=self.window)


def arguments(parser: argparse.ArgumentParser) -> None:
    spellings = {one.name: f"--{one.name.replace('_', '-')}" for one in fields(GenerateSettings)}
    what = parser.add_mutually_exclusive_group(required=True)
    add_flags(what, GenerateSettings, {k: spellings.pop(k) for k in ("prompt", "prompt_file")})
    add_flags(parser, GenerateSettings, spellings)
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object instead of the text"
    )


def run(args: argparse.Namespace) -> None:
    settings = GenerateSettings(**given(args, GenerateSettings))
    text = _text(settings)
    if "torch" not in sys.modules:
        # OpenMP's threads spin while they wait for one another, and hold the core that the last of
        # them needs. On a busy machine a tiny model then takes 20 times as long.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from sglang_dflash.transformers_loop import chat_tokens, load

    pair = demo_pair("dense")
    target, draft = settings.target or str(pair.target), settings.draft or str(pair.draft)
    loaded = load(target, draft, settings.options, settings.dtype, settings.device)
    if settings.chat:
        tokens = chat_tokens(loaded.tokenizer, [{"role": "user", "content": text}])
    else:
        tokens = loaded.tokenizer(text)["input_ids"]
    if not tokens:
        raise ConfigError("prompt", text, "at least one token is required")
    figures = _continue(settings, loaded, tokens, is_shown=not args.json)
    if args.json:
        print(json.dumps({"target": target, "draft": draft, **figures}))
        return
    print(
        f"{len(figures['tokens'])} tokens in {figures['seconds']:.2f} s: "
        f"{figures['tokens_per_second']:.1f} tokens/s, "
        f"acceptance length {figures['acceptance_length']:.2f} ({figures['finish_reason']})",
        file=sys.stderr,
    )


def _text(settings: GenerateSettings) -> str:
    """The prompt, or the text of its file."""
    name, text = settings.prompt_file, settings.prompt or ""
    if name is not None:
        try:
            text = sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError("prompt_file", name, f"a text file in UTF-8 ({error})") from error
    if not text:
        raise ConfigError("prompt" if name is None else "prompt_file", text, "a text is required")
    return text


def _continue(
    settings: GenerateSettings, pair: LoadedPair, tokens: list[int], *, is_shown: bool
) -> dict[str, Any]:
    """Continue a prompt; if `is_shown`, stdout gets the text while it is generated.

    Returns:
        The fields of `--json`; times are in seconds and include the prefill.
    """
    import torch
    from transformers import TextStreamer

    from sglang_dflash.transformers_loop import sampler, spec_generate

    seed = random.randrange(2**63) if settings.seed is None else settings.seed
    generator = torch.Generator(pair.device).manual_seed(seed)
    stream = TextStreamer(pair.tokenizer, skip_special_tokens=True)
    start = time.perf_counter()
    out = spec_generate(
        pair.draft,
        pair.target,
        torch.tensor([tokens], device=pair.device),
        settings.max_new_tokens,
        options=settings.options,
        stop_token_ids=pair.stop_token_ids,
        choose=sampler(settings.temperature, settings.top_k, settings.top_p, generator=generator),
        on_tokens=(lambda new: stream.put(torch.tensor(new))) if is_shown else None,
    )
    seconds = time.perf_counter() - start
    if is_shown:
        stream.end()
    return {
        "device": str(pair.device),
        "dtype": str(pair.dtype).removeprefix("torch."),
        "block_size": settings.options.resolve(pair.draft.config).block_size,
        "window": settings.window,
        "temperature": settings.temperature,
        "top_p": settings.top_p,
        "top_k": settings.top_k,
        "seed": seed if settings.temperature else None,
        "finish_reason": "stop" if out.tokens[-1] in pair.stop_token_ids else "length",
        "text": pair.tokenizer.decode(out.tokens, skip_special_tokens=True),
        "prompt_tokens": len(tokens),
        "tokens": out.tokens,
        "seconds": round(seconds, 4),
        "tokens_per_second": round(len(out.tokens) / seconds, 2),
        "verify_steps": len(out.committed),
        "acceptance_length": round(out.acceptance_length, 3),
    }
