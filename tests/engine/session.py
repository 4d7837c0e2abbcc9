"""The servers of one pytest process; the answers and files that its session's processes share."""

from __future__ import annotations

import fcntl
import os
import pickle
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import requests

from sglang_dflash.common.errors import Failed
from sglang_dflash.tools.bench.server import Server
from tests.engine import checkpoints, client
from tests.engine.nursery import ForkedServer, Nursery
from tests.engine.servers import FILES, Ask, ServerConfig, recording_name

# Seconds for the start of a server from the command line: the first one compiles kernels.
COMPILING_S = 900


class ServerSession:
    """Servers of a test session, of which at most one is alive per process: two cores hold two.

    `needed` lists the recordings that tests of this session have declared: when one of a server's
    is made, all of them are, so that the server is not started for each.
    """

    def __init__(self, folder: Path) -> None:
        """`folder`: shared by the processes of a session (`pytest -n 2`), empty at its start."""
        self.folder = folder
        self.needed: dict[ServerConfig, list[Ask]] = {}
        self._nurseries: dict[tuple[str, ...], Nursery] = {}
        self._live: tuple[ServerConfig, Server] | None = None
        self._known: dict[tuple[ServerConfig, Ask], Any] = {}

    def server(self, config: ServerConfig) -> Server:
        """The running server of that configuration; another one is stopped first."""
        if self._live is not None and self._live[0] == config:
            return self._live[1]
        server = self.own(config)
        server.__enter__()
        self._live = config, server
        return server

    def own(self, config: ServerConfig) -> Server:
        """A server for one test to start; the running one is stopped."""
        self.stop()
        if not config.nursery:
            return Server(self.filled(config), COMPILING_S)
        return ForkedServer(self.nursery_of(config), self.filled(config))

    @property
    def nursery(self) -> Nursery:
        """The nursery of ordinary servers."""
        return self.nursery_of(ServerConfig())

    def nursery_of(self, config: ServerConfig) -> Nursery:
        """The process that forks such servers, started on first use."""
        if config.nursery not in self._nurseries:
            self._nurseries[config.nursery] = Nursery(config.nursery)
        return self._nurseries[config.nursery]

    def stop(self) -> None:
        """End the running server, if there is one."""
        if self._live is not None:
            self._live[1].stop()
        self._live = None

    def close(self) -> None:
        try:
            self.stop()
        finally:
            for nursery in self._nurseries.values():
                nursery.close()

    def filled(self, config: ServerConfig) -> ServerConfig:
        """The configuration with the session's folder for `{files}`, and the files that it names
        made."""
        return replace(
            config,
            flags={
                name: value if value is True else self._rendered(str(value))
                for name, value in config.flags.items()
            },
            extra_args=tuple(map(self._rendered, config.extra_args)),
            env={name: self._rendered(value) for name, value in config.env.items()},
        )

    def path(self, text: str) -> Path:
        """A path that starts with `{files}`."""
        return Path(self._rendered(text))

    def record(self, config: ServerConfig, *asks: Ask) -> None:
        """Make sure that a server's answers to `asks` are known, in whichever process."""
        with self._locked(str(config)):
            if all(self._recording(config, ask).exists() for ask in asks):
                return
            for ask in dict.fromkeys((*asks, *self.needed.get(config, ()))):
                if self._recording(config, ask).exists():
                    continue
                try:
                    self._ask(config, ask)
                except (AssertionError, requests.RequestException, Failed):
                    # The tests that need the others ask again, and fail.
                    if ask in asks:
                        raise

    def answers(self, config: ServerConfig, ask: Ask) -> Any:
        """A server's answers to `ask`, asked once per session, its prefix cache empty before."""
        if (config, ask) not in self._known:
            self.record(config, ask)
            self._known[config, ask] = pickle.loads(self._recording(config, ask).read_bytes())
        return self._known[config, ask]

    def _ask(self, config: ServerConfig, ask: Ask) -> None:
        server = self.server(config)
        client.flush(server)
        _write(self._recording(config, ask), pickle.dumps(ask(server)))

    def _recording(self, config: ServerConfig, ask: Ask) -> Path:
        return self.folder / recording_name(config, ask)

    def _rendered(self, text: str) -> str:
        for name in re.findall(re.escape(FILES) + r"/([\w-]+)", text):
            if name in checkpoints.MAKERS:
                self._make(name)
        return text.replace(FILES, str(self.folder))

    def _make(self, name: str) -> None:
        with self._locked(f"{name}.files"):
            if not (self.folder / name).exists():
                unfinished = self.folder / f"{name}.unfinished"
                unfinished.mkdir()
                checkpoints.MAKERS[name](unfinished)
                unfinished.rename(self.folder / name)

    @contextmanager
    def _locked(self, name: str) -> Iterator[None]:
        """One process at a time. Released by the system if the process ends."""
        with (self.folder / f"{name}.lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def _write(path: Path, content: bytes) -> None:
    """Whole or not at all: other processes look for the file."""
    unfinished = path.with_suffix(f".{os.getpid()}")
    unfinished.write_bytes(content)
    unfinished.rename(path)
