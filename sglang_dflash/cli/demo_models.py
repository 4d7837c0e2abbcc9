"""`sglang-dflash demo-models`."""

from __future__ import annotations

import argparse

from sglang_dflash.facts.embedded import demo_pair


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("kind", help="dense; in a checkout also code and hybrid")


def run(args: argparse.Namespace) -> None:
    pair = demo_pair(args.kind)
    print(pair.target.resolve())
    print(pair.draft.resolve())
