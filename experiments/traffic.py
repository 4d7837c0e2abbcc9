"""`python -m experiments.traffic`: the experiment `traffic` by another spelling."""

from __future__ import annotations

import sys

from experiments.runner import main

if __name__ == "__main__":
    sys.exit(main(["traffic", *sys.argv[1:]]))
