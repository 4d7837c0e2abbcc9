"""`sglang-dflash generate`: one prompt over a Hugging Face target, streamed as it comes."""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from sglang_dflash.checkpoint.draft_config import DraftConfig
from sglang_dflash.checkpoint.errors import ConfigError
from sglang_dflash.checkpoint.hub import draft_folder
from sglang_dflash.core.model import DraftModel
from sglang_dflash.core.weights import load_model
from sglang_dflash.hf.arguments import Request
from sglang_dflash.hf.generation import Generation, chat_tokens, sampler, spec_generate


@dataclass(frozen=True)
class Loaded:
    """A pair that is ready, its tokenizer, and the ids that end a text."""

    draft: DraftModel
    target: Any
    tokenizer: Any
    stop_token_ids: tuple[int, ...]
    device: torch.device
    dtype: str


def load(request: Request) -> Loaded:
    """Read the pair from disk or the hub. Raises ConfigError: something of it is not to be had, or the two do not fit."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    device = _device(request.device)
    dtype = request.dtype or ("float32" if device.type == "cpu" else "bfloat16")
    folder = draft_folder("--draft", request.draft)
    config = DraftConfig.from_pretrained(folder)
    request.options.resolve(config)
    try:
        # The configuration before the weights: a pair that does not fit is told within seconds.
        of = AutoConfig.from_pretrained(request.target).get_text_config()
        config.check_target(
            hidden_size=of.hidden_size, vocab_size=of.vocab_size, num_layers=of.num_hidden_layers
        )
        tokenizer = AutoTokenizer.from_pretrained(request.target)
        target: Any = AutoModelForCausalLM.from_pretrained(
            request.target, dtype=getattr(torch, dtype)
        ).eval()
    except ConfigError:
        raise
    except (OSError, ValueError) as error:
        first_line = str(error).strip().split("\n")[0]
        raise ConfigError(
            f"--target: {request.target!r} is no causal language model that Transformers can load ({first_line})"
        ) from error
    draft = load_model(folder, dtype=getattr(torch, dtype), device=device)
    return Loaded(
        draft, target.to(device), tokenizer, _stop_token_ids(target, tokenizer), device, dtype
    )


def _device(name: str | None) -> torch.device:
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.empty(0, device=device)
    # What torch raises for a device that is not there differs by backend.
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ConfigError(
            f"--device: {name!r} cannot be used here ({str(error).splitlines()[0]}); 'cpu' always can"
        ) from error
    return device


def _stop_token_ids(target: Any, tokenizer: Any) -> tuple[int, ...]:
    """As `generate` has them: the generation config's, and the tokenizer's only where that names none."""
    named = target.generation_config.eos_token_id
    if named is None:
        named = tokenizer.eos_token_id
    return tuple(named) if isinstance(named, list) else () if named is None else (named,)


def prompt_tokens(request: Request, tokenizer: Any) -> list[int]:
    ids = (
        chat_tokens(tokenizer, [{"role": "user", "content": request.prompt}])
        if request.chat
        else tokenizer(request.prompt)["input_ids"]
    )
    if not ids:
        raise ConfigError(f"--prompt: {request.prompt!r} has no token; give at least one")
    return ids


class TextStream:
    """Token ids to text, piece by piece: what has been written is never taken back."""

    def __init__(self, tokenizer: Any, write: Callable[[str], Any]) -> None:
        self._decode = lambda ids: tokenizer.decode(ids, skip_special_tokens=True)
        self._write, self._ids = write, list[int]()
        # Everything before `_done` has been written; decoding starts at `_start`, a piece earlier, because some tokenizers
        # write a token otherwise where a text begins.
        self._start = self._done = 0

    def add(self, new: list[int]) -> None:
        self._ids += new
        text = self._pending()
        # A character may be spread over several tokens; until it is whole, it decodes to a replacement character.
        if text and not text.endswith("\ufffd"):
            self._advance(text)

    def end(self) -> None:
        self._advance(self._pending())

    def _pending(self) -> str:
        written = self._decode(self._ids[self._start : self._done])
        return self._decode(self._ids[self._start :])[len(written) :]

    def _advance(self, text: str) -> None:
        self._write(text)
        self._start, self._done = self._done, len(self._ids)


def generate(
    request: Request, pair: Loaded, write: Callable[[str], Any] = lambda _: None
) -> dict[str, Any]:
    """Continue the prompt, `write` the text as it comes, and sum up (times in seconds, from before the prefill)."""
    ids = torch.tensor([prompt_tokens(request, pair.tokenizer)], device=pair.device)
    seed = random.randrange(2**63) if request.seed is None else request.seed
    generator = torch.Generator(pair.device).manual_seed(seed)
    choose = sampler(request.temperature, request.top_k, request.top_p, generator=generator)
    stream, began = TextStream(pair.tokenizer, write), time.perf_counter()
    out = spec_generate(
        pair.draft, pair.target, ids, request.max_new_tokens,
        options=request.options, stop_token_ids=pair.stop_token_ids, choose=choose, on_tokens=stream.add,
    )  # fmt: skip
    seconds = time.perf_counter() - began
    stream.end()
    return _summed_up(request, pair, out, seconds, seed) | {"prompt_tokens": ids.shape[1]}


def _summed_up(
    request: Request, pair: Loaded, out: Generation, seconds: float, seed: int
) -> dict[str, Any]:
    stopped = bool(out.tokens) and out.tokens[-1] in pair.stop_token_ids
    return {
        "target": request.target, "draft": request.draft, "device": str(pair.device), "dtype": pair.dtype,
        "block_size": request.options.resolve(pair.draft.config).block_size, "window": request.options.window,
        "temperature": request.temperature, "top_p": request.top_p, "top_k": request.top_k,
        "seed": seed if request.temperature else None, "finish_reason": "stop" if stopped else "length",
        "text": pair.tokenizer.decode(out.tokens, skip_special_tokens=True), "tokens": out.tokens,
        "seconds": round(seconds, 4), "tokens_per_second": round(len(out.tokens) / seconds, 2),
        "verify_steps": len(out.committed), "acceptance_length": round(out.acceptance_length, 3),
    }  # fmt: skip


def main(request: Request, as_json: bool) -> None:
    """Stream the text to stdout and end with one line on stderr; or print one JSON object instead."""
    pair = load(request)
    if as_json:
        print(json.dumps(generate(request, pair)))
        return

    def write(text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    done = generate(request, pair, write)
    write("\n")
    print(
        f"{len(done['tokens'])} tokens in {done['seconds']:.2f} s: {done['tokens_per_second']:.1f} tokens/s, "
        f"acceptance length {done['acceptance_length']:.2f} ({done['finish_reason']})",
        file=sys.stderr,
    )
