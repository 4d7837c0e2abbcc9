"""Shared by the tests of launch commands: tiny checkpoints, and SGLang's argument resolution."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.serving.published import tiny_checkpoints


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return tiny_checkpoints(tmp_path_factory.mktemp("published"))


@pytest.fixture(scope="session")
def resolve() -> Callable[[list[str]], Any]:
    """Command-line arguments to SGLang's resolved arguments, as the launcher makes them."""
    from sglang.srt.plugins import load_plugins

    load_plugins()

    def of(argv: list[str]) -> Any:
        from sglang.srt.server_args import prepare_server_args

        server_args = prepare_server_args(argv)
        server_args.resolve_once()
        return server_args

    return of
