"""`sglang-dflash generate`: continue one prompt over Transformers, as a stream."""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from typing import TYPE_CHECKING, Any

from sglang_dflash.common.command_line import add_flags, given, spelled
from sglang_dflash.common.errors import ConfigError
from sglang_dflash.drafting.options import Options
from sglang_dflash.tools.demo_pairs.pairs import demo_pair

if TYPE_CHECKING:
    from sglang_dflash.tools.transformers_loop import LoadedPair


def arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--target", help="a folder or a hub name (default: the embedded dense pair's)")
    add("--draft", help="a folder or a hub name (default: the embedded dense pair's)")
    add("--prompt", required=True, help="the text to continue")
    add("--chat", action="store_true", help="it is a user's message: apply the chat template")
    add("--max-new-tokens", type=int, default=128, help="default: %(default)s")
    add("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    add("--top-p", type=float, default=1.0, help="keep the likeliest tokens of this mass")
    add("--top-k", type=int, default=0, help="keep this many of the likeliest tokens; 0: all")
    add("--seed", type=int, help="of the sampling (default: a new one)")
    add_flags(parser, Options, spelled(("window",), verify_block="--block-size"))
    add("--dtype", help="default: float32 on a CPU, bfloat16 elsewhere")
    add("--device", help="as torch names it (default: the first GPU, or cpu)")
    add("--json", action="store_true", help="print one JSON object instead of the text")


def run(args: argparse.Namespace) -> None:
    if (args.target is None) != (args.draft is None):
        required = "give {target} and {draft}, or neither for the embedded dense pair"
        raise ConfigError("target", args.target, required)
    if args.target is None:
        pair = demo_pair("dense")
        args.target, args.draft = str(pair.target), str(pair.draft)
    if "torch" not in sys.modules:
        # OpenMP's threads spin while they wait for each other. On a busy machine they occupy the
        # core that the last one needs, and a tiny model takes 20 times as long.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from sglang_dflash.tools.transformers_loop import Sampler, chat_tokens, load
    from sglang_dflash.tools.transformers_loop.checks import check_new_tokens

    # Check the arguments before anything is loaded.
    check_new_tokens(args.max_new_tokens)
    args.seed = random.randrange(2**63) if args.seed is None else args.seed
    choose = Sampler(args.temperature, args.top_k, args.top_p, args.seed)
    options = Options(**given(args, Options))
    loaded = load(args.target, args.draft, options, args.dtype, args.device)
    if args.chat:
        tokens = chat_tokens(loaded.tokenizer, [{"role": "user", "content": args.prompt}])
    else:
        tokens = loaded.tokenizer(args.prompt)["input_ids"]
    if not tokens:
        raise ConfigError("prompt", args.prompt, "at least one token is required")
    figures = _continue(args, options, choose, loaded, tokens)
    if args.json:
        print(json.dumps({"target": args.target, "draft": args.draft, **figures}))
        return
    ended = {"stop": "by a stop token", "length": "at --max-new-tokens"}
    print(
        f"{len(figures['tokens'])} tokens in {figures['seconds']:.2f} s: "
        f"{figures['tokens_per_second']:.1f} tokens/s, "
        f"acceptance length {figures['acceptance_length']:.2f}; "
        f"ended {ended[figures['finish_reason']]}",
        file=sys.stderr,
    )


def _continue(
    args: argparse.Namespace, options: Options, choose: Any, pair: LoadedPair, tokens: list[int]
) -> dict[str, Any]:
    """Continue a prompt. Without `--json`, the text is written to stdout while it is generated.

    Returns:
        The fields of `--json`; times are in seconds and include the prefill.
    """
    import torch
    from transformers import TextStreamer

    from sglang_dflash.tools.transformers_loop import spec_generate

    stream = TextStreamer(pair.tokenizer, skip_special_tokens=True)
    start = time.perf_counter()
    out = spec_generate(
        pair.draft,
        pair.target,
        torch.tensor([tokens], device=pair.draft.device),
        args.max_new_tokens,
        options=options,
        stop_token_ids=pair.stop_token_ids,
        choose=choose,
        on_tokens=None if args.json else lambda new: stream.put(torch.tensor(new)),
    )
    seconds = time.perf_counter() - start
    if not args.json:
        stream.end()
    return {
        "device": str(pair.draft.device),
        "dtype": str(pair.draft.dtype).removeprefix("torch."),
        "block_size": options.resolve(pair.draft.config).verify_block,
        "seed": args.seed if args.temperature else None,
        "finish_reason": "stop" if out.tokens[-1] in pair.stop_token_ids else "length",
        "text": pair.tokenizer.decode(out.tokens, skip_special_tokens=True),
        "prompt_tokens": len(tokens),
        "tokens": out.tokens,
        "seconds": round(seconds, 4),
        "tokens_per_second": round(len(out.tokens) / seconds, 2),
        "verify_steps": len(out.committed),
        "acceptance_length": round(out.acceptance_length, 3),
    }
