"""Servers for the tests of this folder.

A test names the server that it uses with `@pytest.mark.server(CONFIG)` or a parameter `config`, and
gets it as the fixture `server`. It declares other servers' answers with
`@pytest.mark.recorded(CONFIG, ask, ...)` and reads them as `answers(CONFIG, ask)`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest

from sglang_dflash.tools.bench.server import Server
from tests.conftest import SHARED_FOLDER
from tests.engine.servers import PLAIN, Ask, ServerConfig
from tests.engine.session import ServerSession

HERE = Path(__file__).parent


class ReadAnswers(Protocol):
    def __call__(self, config: ServerConfig, ask: Ask) -> Any: ...


def pytest_configure(config: pytest.Config) -> None:
    for line in (
        "server(config): the server that the test uses",
        "recorded(config, *asks): answers of another server that the test compares with",
    ):
        config.addinivalue_line("markers", line)


def config_of(item: pytest.Item) -> ServerConfig | None:
    """The server that a test uses."""
    marker = item.get_closest_marker("server")
    if marker is not None:
        return marker.args[0]
    config = item.callspec.params.get("config") if hasattr(item, "callspec") else None
    return config if isinstance(config, ServerConfig) else None


def recordings_of(item: pytest.Item) -> dict[ServerConfig, list[Ask]]:
    """Answers that a test declares, by server."""
    declared: dict[ServerConfig, list[Ask]] = {}
    for marker in item.iter_markers("recorded"):
        config, *asks = marker.args
        declared.setdefault(config, []).extend(asks)
    return declared


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Bring tests of one server together, and under xdist to one process (`--dist loadgroup`)."""
    places: dict[ServerConfig | None, int] = {}
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.engine)
            config = config_of(item)
            places.setdefault(config, len(places) if config is not None else -1)
            group = item.nodeid.partition("::")[0] if config is None else config.name
            item.add_marker(pytest.mark.xdist_group(group))
    waits = {config_of(item) for item in items if PLAIN in recordings_of(item)}

    def place(item: pytest.Item) -> tuple[int, int]:
        """One process records the plain server's answers first, while the other one takes tests
        that do not wait for them. Tests of other folders are short, and fill the end."""
        if HERE not in item.path.parents:
            return 3, -1
        config = config_of(item)
        if config is None:
            return (2 if PLAIN in recordings_of(item) else -1), -1
        return (0 if config == PLAIN else 2 if config in waits else 1), places[config]

    items.sort(key=place)


@pytest.fixture(scope="package")
def servers(request: pytest.FixtureRequest) -> Iterator[ServerSession]:
    """Closed before tests of other folders: idle replicas of a server keep a core busy."""
    session = ServerSession(Path(os.environ[SHARED_FOLDER]))
    for item in request.session.items:
        for config, asks in recordings_of(item).items():
            session.needed.setdefault(config, []).extend(asks)
    yield session
    session.close()


@pytest.fixture
def recorded(request: pytest.FixtureRequest, servers: ServerSession) -> dict[Any, list[Ask]]:
    """Return the recordings that the test declares, known before its own server starts."""
    declared = recordings_of(request.node)
    for config, asks in declared.items():
        servers.record(config, *asks)
    return declared


@pytest.fixture
def answers(
    request: pytest.FixtureRequest, servers: ServerSession, recorded: dict[Any, list[Ask]]
) -> ReadAnswers:
    """(configuration, ask) -> the server's answers: the test's own server, or declared ones."""

    def read(config: ServerConfig, ask: Ask) -> Any:
        declared = config == config_of(request.node) or ask in recorded.get(config, ())
        assert declared, f"declare it: @pytest.mark.recorded({config}, {ask.__name__})"
        return servers.answers(config, ask)

    return read


@pytest.fixture
def server(
    request: pytest.FixtureRequest, servers: ServerSession, recorded: dict[Any, list[Ask]]
) -> Server:
    """The server that the test names, running."""
    del recorded
    config = config_of(request.node)
    assert config is not None, "name a server: @pytest.mark.server(CONFIG)"
    return servers.server(config)
