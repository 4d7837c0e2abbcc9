"""The `sglang-dflash` command."""

from __future__ import annotations

import argparse
import sys

from sglang_dflash.bench.demo_models import demo_pair
from sglang_dflash.config import ConfigError


def main(argv: list[str] | None = None) -> int:
    """Run one sub-command; 1 with the reason on stderr where it cannot be done."""
    parser = argparse.ArgumentParser(prog="sglang-dflash", description="DFlash speculative decoding for SGLang")
    commands = parser.add_subparsers(dest="command", required=True)
    models = commands.add_parser("demo-models", help="print the directories of an embedded pair: the target's, then the draft's")
    models.add_argument("kind", help="dense")
    args = parser.parse_args(argv)
    try:
        pair = demo_pair(args.kind)
    except ConfigError as error:
        print(f"sglang-dflash: {error}", file=sys.stderr)
        return 1
    print(pair.target.resolve())
    print(pair.draft.resolve())
    return 0


if __name__ == "__main__":
    sys.exit(main())
