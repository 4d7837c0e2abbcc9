"""`python -m tests.fake_gpu [--without PACKAGE] MODULE ARGUMENTS`: run a module on a faked GPU.

So does every `python -m MODULE` that it starts, as the servers of `experiments gpu_servers`.
"""

from __future__ import annotations

import multiprocessing
import runpy
import subprocess
import sys
from typing import Any

from tests.fake_gpu.install import install


def start_modules_with(words: list[str]) -> None:
    """Put `words` before the module of each `python -m MODULE` that is started from now on."""
    start = subprocess.Popen.__init__

    def on_gpu(self: Any, args: Any, *rest: Any, **how: Any) -> None:
        if isinstance(args, list) and args[:2] == [sys.executable, "-m"]:
            args = [*args[:2], *words, *args[2:]]
        start(self, args, *rest, **how)

    subprocess.Popen.__init__ = on_gpu  # type: ignore[method-assign]


def main(words: list[str]) -> None:
    """Children are forked, so that they have the GPU, too."""
    given = words
    without = []
    while words[0] == "--without":
        without.append(words[1])
        words = words[2:]
    install(tuple(without))
    start_modules_with(["tests.fake_gpu", *given[: len(given) - len(words)]])
    multiprocessing.set_start_method("fork", force=True)
    multiprocessing.set_start_method = lambda *args, **kwargs: None
    sys.argv = words
    runpy.run_module(words[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv[1:])
