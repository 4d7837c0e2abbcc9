"""`python -m experiments.gpu`: the experiment `gpu` by another spelling."""

from __future__ import annotations

import signal
import sys

from experiments.runner import main

if __name__ == "__main__":
    # As an exception, so that the servers of an experiment end with it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(main(["gpu", *sys.argv[1:]]))
