"""`python -m benchmarks EXPERIMENT [options]`, `python -m benchmarks --list`."""

from __future__ import annotations

import sys

from benchmarks.runner import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
