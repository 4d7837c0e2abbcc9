"""Offline: SGLang's Engine with DFlash, without a server.

    python examples/offline_engine.py
    python examples/offline_engine.py --target Qwen/Qwen3-8B --draft z-lab/Qwen3-8B-DFlash-b16

The plugin is loaded by SGLang itself. Keyword arguments are the flags of `sglang serve`,
ours included (docs/flags.md).
"""

from __future__ import annotations

import argparse

import sglang

from sglang_dflash.tools.demo_pairs.pairs import demo_pair


def main() -> None:
    demo = demo_pair("dense")
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--target", default=str(demo.target))
    parser.add_argument("--draft", default=str(demo.draft))
    parser.add_argument("--prompt", action="append", help="may be repeated")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    args = parser.parse_args()
    prompts = args.prompt or demo.prompts[:2]

    engine = sglang.Engine(
        model_path=args.target,
        speculative_algorithm="DFLASH",
        speculative_draft_model_path=args.draft,
        log_level="error",
    )
    try:
        sampling = {"temperature": 0, "max_new_tokens": args.max_new_tokens}
        for prompt, answer in zip(prompts, engine.generate(prompts, sampling), strict=True):
            tokens = answer["meta_info"]["completion_tokens"]
            steps = answer["meta_info"]["spec_verify_ct"]
            print(prompt + answer["text"])
            print(f"-- {tokens} tokens in {steps} verify steps\n")
    finally:
        engine.shutdown()


# The engine starts processes that import this file.
if __name__ == "__main__":
    main()
