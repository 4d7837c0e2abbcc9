"""A server process belongs to whoever started it, however that ends."""

from __future__ import annotations

import subprocess

import pytest

from sglang_dflash.bench.server import Server


class Interrupted(Server):
    """Stands for one that is told to end while it starts."""

    def start(self) -> None:
        self.process = subprocess.Popen(["sleep", "60"], start_new_session=True)

    def wait(self) -> None:
        raise KeyboardInterrupt


def test_an_interrupted_start_leaves_nothing_behind() -> None:
    server = Interrupted([])
    with pytest.raises(KeyboardInterrupt), server:
        pass
    assert server.process.poll() is not None
