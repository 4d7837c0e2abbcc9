"""A stream from a running server, through the OpenAI client.

Start a server first, for example the embedded pair's (any OpenAI-compatible server will do):

    python -m sglang.launch_server --model-path launch/demo_models/dense/target \
        --speculative-algorithm DFLASH \
        --speculative-draft-model-path launch/demo_models/dense/draft

    python examples/openai_client.py
    python examples/openai_client.py --base-url http://HOST:30000/v1 --prompt 'Why is the sky blue?'
"""

from __future__ import annotations

import argparse

from openai import OpenAI

from sglang_dflash.facts.embedded import demo_pair


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--base-url", default="http://127.0.0.1:30000/v1")
    parser.add_argument("--prompt", default=demo_pair("dense").prompts[0])
    parser.add_argument("--max-tokens", type=int, default=64)
    args = parser.parse_args()

    client = OpenAI(base_url=args.base_url, api_key="EMPTY")
    stream = client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=[{"role": "user", "content": args.prompt}],
        max_tokens=args.max_tokens,
        temperature=0.0,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        for choice in chunk.choices:
            print(choice.delta.content or "", end="", flush=True)
        if chunk.usage is not None:
            print(f"\n-- {chunk.usage.completion_tokens} tokens")


if __name__ == "__main__":
    main()
