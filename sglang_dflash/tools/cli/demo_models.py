"""`sglang-dflash demo-models`."""

from __future__ import annotations

import argparse

from sglang_dflash.tools.demo_pairs import public_target
from sglang_dflash.tools.demo_pairs.pairs import demo_pair, kinds


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("kind", nargs="?", help="the pair; without it, the pairs are listed")


def run(args: argparse.Namespace) -> None:
    if args.kind is None:
        for name, text in kinds().items():
            print(f"{name:14}{text}")
        return
    if args.kind in kinds() and args.kind == public_target.KIND:
        from sglang_dflash.tools.demo_pairs.fetch import fetch

        fetch()
    pair = demo_pair(args.kind)
    print(pair.target.resolve())
    print(pair.draft.resolve())
