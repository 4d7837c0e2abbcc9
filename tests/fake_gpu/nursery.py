"""`tests.engine.nursery` with a faked GPU: `python -m tests.fake_gpu.nursery [PACKAGE ...]`, of
which none is installed. Servers that it forks have imported everything."""

from __future__ import annotations

import sys

from tests.fake_gpu.install import install

if __name__ == "__main__":
    install(tuple(sys.argv[1:]))
    from tests.engine import nursery

    nursery.main()
