"""`sglang-dflash generate`: continue one prompt over a Hugging Face target, as a stream."""

from __future__ import annotations

import json
import logging
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from sglang_dflash.drafting.model import DraftModel
from sglang_dflash.drafting.weights import load_model
from sglang_dflash.facts.draft_config import DraftConfig
from sglang_dflash.facts.errors import ConfigError
from sglang_dflash.facts.hub import draft_folder
from sglang_dflash.transformers_loop.arguments import GenerateArgs
from sglang_dflash.transformers_loop.checks import device_named
from sglang_dflash.transformers_loop.generation import (
    Generation,
    chat_tokens,
    sampler,
    spec_generate,
)
from sglang_dflash.transformers_loop.text_stream import TextStream
from sglang_dflash.transformers_loop.threads import threads_for

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Loaded:
    """A loaded pair, its tokenizer, and the ids that end a text."""

    draft: DraftModel
    target: Any
    tokenizer: Any
    stop_token_ids: tuple[int, ...]
    device: torch.device
    dtype: str


def load(args: GenerateArgs) -> Loaded:
    """Load the pair from disk or the hub.

    Raises:
        ConfigError: the target or the draft cannot be loaded, the two do not fit, or the options do
            not fit the draft.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    device = device_named(
        "--device", args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    )
    dtype = args.dtype or ("float32" if device.type == "cpu" else "bfloat16")
    folder = draft_folder("--draft", args.draft)
    config = DraftConfig.from_pretrained(folder)
    resolved = args.options.resolve(config)
    try:
        # The target's weights come last: a draft that does not fit is refused within seconds.
        text = AutoConfig.from_pretrained(args.target).get_text_config()
        config.check_target(
            hidden_size=text.hidden_size,
            vocab_size=text.vocab_size,
            num_layers=text.num_hidden_layers,
        )
        context = getattr(text, "max_position_embeddings", None)
        args.options.check_room(resolved, context=context, kv_tokens=None)
        for warning in resolved.warnings(config, context, {}):
            logger.warning("%s", warning)
        draft = load_model(folder, dtype=getattr(torch, dtype), device=device)
        tokenizer = AutoTokenizer.from_pretrained(args.target)
        target: Any = AutoModelForCausalLM.from_pretrained(
            args.target, dtype=getattr(torch, dtype)
        ).eval()
    except ConfigError:
        raise
    except (OSError, ValueError) as error:
        first_line = str(error).strip().split("\n")[0]
        raise ConfigError(
            f"--target: {args.target!r} is no causal language model that Transformers can load "
            f"({first_line})"
        ) from error
    stop_token_ids = _stop_token_ids(target, tokenizer)
    return Loaded(draft, target.to(device), tokenizer, stop_token_ids, device, dtype)


def _stop_token_ids(target: Any, tokenizer: Any) -> tuple[int, ...]:
    """The generation config's, as in `generate`; the tokenizer's if the config names none."""
    named = target.generation_config.eos_token_id
    if named is None:
        named = tokenizer.eos_token_id
    if named is None:
        return ()
    return tuple(named) if isinstance(named, list) else (named,)


def prompt_tokens(args: GenerateArgs, tokenizer: Any) -> list[int]:
    """Token ids of the prompt. Raises ConfigError if there are none, or as `chat_tokens`."""
    if args.chat:
        ids = chat_tokens(tokenizer, [{"role": "user", "content": args.prompt}])
    else:
        ids = tokenizer(args.prompt)["input_ids"]
    if not ids:
        raise ConfigError(f"--prompt: {args.prompt!r} has no token; give at least one")
    return ids


def generate(
    args: GenerateArgs, pair: Loaded, write: Callable[[str], Any] = lambda _: None
) -> dict[str, Any]:
    """Continue the prompt and `write` the text as a stream.

    Returns:
        The fields of `--json`; times are in seconds and include the prefill.
    """
    ids = torch.tensor([prompt_tokens(args, pair.tokenizer)], device=pair.device)
    seed = random.randrange(2**63) if args.seed is None else args.seed
    generator = torch.Generator(pair.device).manual_seed(seed)
    choose = sampler(args.temperature, args.top_k, args.top_p, generator=generator)
    stream, start = TextStream(pair.tokenizer, write), time.perf_counter()
    with threads_for(pair.target, pair.draft):
        out = spec_generate(
            pair.draft,
            pair.target,
            ids,
            args.max_new_tokens,
            options=args.options,
            stop_token_ids=pair.stop_token_ids,
            choose=choose,
            on_tokens=stream.add,
        )
    seconds = time.perf_counter() - start
    stream.end()
    return _summary(args, pair, out, seconds, seed) | {"prompt_tokens": ids.shape[1]}


def _summary(
    args: GenerateArgs, pair: Loaded, out: Generation, seconds: float, seed: int
) -> dict[str, Any]:
    stopped = bool(out.tokens) and out.tokens[-1] in pair.stop_token_ids
    return {
        "target": args.target,
        "draft": args.draft,
        "device": str(pair.device),
        "dtype": pair.dtype,
        "block_size": args.options.resolve(pair.draft.config).block_size,
        "window": args.options.window,
        "temperature": args.temperature,
        "top_p": args.top_p,
        "top_k": args.top_k,
        "seed": seed if args.temperature else None,
        "finish_reason": "stop" if stopped else "length",
        "text": pair.tokenizer.decode(out.tokens, skip_special_tokens=True),
        "tokens": out.tokens,
        "seconds": round(seconds, 4),
        "tokens_per_second": round(len(out.tokens) / seconds, 2),
        "verify_steps": len(out.committed),
        "acceptance_length": round(out.acceptance_length, 3),
    }


def main(args: GenerateArgs, as_json: bool) -> None:
    """Stream the text to stdout, then a line of figures to stderr; or print one JSON object."""
    pair = load(args)
    if as_json:
        print(json.dumps(generate(args, pair)))
        return

    def write(text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    done = generate(args, pair, write)
    write("\n")
    print(
        f"{len(done['tokens'])} tokens in {done['seconds']:.2f} s: "
        f"{done['tokens_per_second']:.1f} tokens/s, "
        f"acceptance length {done['acceptance_length']:.2f} ({done['finish_reason']})",
        file=sys.stderr,
    )
