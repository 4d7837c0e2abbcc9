"""Measure a table of the `code` pair's model card.

python launch/measure_code_pair.py acceptance [--pair launch/demo_models/code]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]
from demo_training.code_card import TABLES, Pair  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tables", nargs="+", choices=list(TABLES), metavar="TABLE")
    parser.add_argument("--pair", type=Path, default=Path(__file__).parent / "demo_models" / "code")
    args = parser.parse_args()
    torch.set_num_threads(1)
    pair = Pair.load(args.pair)
    for name in args.tables:
        print(f"{name}: {TABLES[name].__doc__}\n{TABLES[name](pair)}", flush=True)


if __name__ == "__main__":
    main()
