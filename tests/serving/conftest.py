"""Shared by the tests of serving: tiny checkpoints, SGLang's argument resolution, and a made-up
preparation of verify forwards."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import pytest

from sglang_dflash.serving.step.batch import DFlashVerifyInput
from tests.serving.in_process import prepared
from tests.serving.published import tiny_checkpoints


@pytest.fixture(autouse=True)
def _prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace SGLang's preparation of a verify forward, for steps of a made-up target."""
    monkeypatch.setattr(DFlashVerifyInput, "prepare_for_verify", prepared)


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return tiny_checkpoints(tmp_path_factory.mktemp("published"))


@pytest.fixture(scope="session")
def parser() -> argparse.ArgumentParser:
    """SGLang's, with our flags. Made once: 500 flags take longer than all that follows."""
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.server_args import ServerArgs

    made = argparse.ArgumentParser(prog="sglang serve")
    ServerArgs.add_cli_args(made)
    return made


@pytest.fixture(scope="session")
def resolve(parser: argparse.ArgumentParser) -> Callable[[list[str]], Any]:
    """Command-line arguments to SGLang's resolved arguments, as the launcher makes them."""
    from sglang.srt.server_args import ServerArgs, prepare_server_args

    def of(argv: list[str]) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(argparse, "ArgumentParser", lambda **_: parser)
            patch.setattr(ServerArgs, "add_cli_args", lambda _: None)
            server_args = prepare_server_args(argv)
        server_args.resolve_once()
        return server_args

    return of
