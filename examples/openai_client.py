"""A stream from a running server, through the OpenAI client.

Start a server first, for example the embedded pair's (any OpenAI-compatible server will do):

    sglang serve --model-path launch/demo_models/dense/target \
        --speculative-algorithm DFLASH \
        --speculative-draft-model-path launch/demo_models/dense/draft

    python examples/openai_client.py
    python examples/openai_client.py --base-url http://HOST:30000/v1 --chat 'Why is the sky blue?'

The embedded pair continues text. A model for chats takes messages, with --chat.
"""

from __future__ import annotations

import argparse

from openai import OpenAI

from sglang_dflash.tools.demo_pairs.pairs import demo_pair


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--base-url", default="http://127.0.0.1:30000/v1")
    parser.add_argument("--prompt", default=demo_pair("dense").prompts[0], help="to be continued")
    parser.add_argument("--chat", metavar="MESSAGE", help="to be answered, in place of a prompt")
    parser.add_argument("--max-tokens", type=int, default=64)
    args = parser.parse_args()

    client = OpenAI(base_url=args.base_url, api_key="EMPTY")
    request = {
        "model": client.models.list().data[0].id,
        "max_tokens": args.max_tokens,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if args.chat is None:
        print(args.prompt, end="")
        stream = client.completions.create(prompt=args.prompt, **request)
    else:
        messages = [{"role": "user", "content": args.chat}]
        stream = client.chat.completions.create(messages=messages, **request)
    for chunk in stream:
        for choice in chunk.choices:
            text = choice.text if args.chat is None else choice.delta.content
            print(text or "", end="", flush=True)
        if chunk.usage is not None:
            print(f"\n-- {chunk.usage.completion_tokens} tokens")


if __name__ == "__main__":
    main()
