"""`python -m tests.fake_gpu [--without PACKAGE] MODULE ARGUMENTS`: run a module on a faked GPU."""

from __future__ import annotations

import multiprocessing
import runpy
import sys

from tests.fake_gpu.install import install


def main(words: list[str]) -> None:
    """Children are forked, so that they have the GPU, too."""
    without = []
    while words[0] == "--without":
        without.append(words[1])
        words = words[2:]
    install(tuple(without))
    multiprocessing.set_start_method("fork", force=True)
    multiprocessing.set_start_method = lambda *args, **kwargs: None
    sys.argv = words
    runpy.run_module(words[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv[1:])
