"""The launch commands of the model cards, through SGLang's own parser and resolution."""

from __future__ import annotations

import itertools
import runpy
import sys
from typing import Any

import pytest

from sglang_dflash.plugins.platform_cpu import OVERLAP
from sglang_dflash.serving.gpu.backends import ATTENTION
from tests.errors import refused
from tests.serving.published import (
    ASKED,
    BACKEND_FLAGS,
    COMMANDS,
    LINE,
    MODELS,
    PUBLISHED,
    WINDOW,
    flags,
    local,
    needs_plain_cpu,
    on_this_machine,
    resolved_fields,
    serving,
)


@pytest.mark.parametrize("name", COMMANDS)
def test_parses_as_printed(name: str, resolve: Any) -> None:
    from sglang.srt.server_args import prepare_server_args

    argv = flags(COMMANDS[name])
    given = prepare_server_args([*argv, *WINDOW])
    for flag, value in itertools.pairwise(argv):
        if flag in (*MODELS, *BACKEND_FLAGS):
            assert getattr(given, flag[2:].replace("-", "_")) == value
    assert {
        field: getattr(given, field) for field in ASKED if field != "mamba_radix_cache_strategy"
    } == {field: value for field, value in ASKED.items() if field != "mamba_radix_cache_strategy"}
    assert given.mamba_radix_cache_strategy == ("auto" if name == "qwen3-8b" else "extra_buffer")


@needs_plain_cpu
@pytest.mark.parametrize("name", PUBLISHED)
def test_a_backend_of_another_machine_is_refused_by_name(
    name: str, resolve: Any, folders: Any
) -> None:
    argv = local(flags(PUBLISHED[name]), folders)
    asked = argv[argv.index(BACKEND_FLAGS[0]) + 1]
    with refused(BACKEND_FLAGS[0], asked):
        resolve(argv)


@needs_plain_cpu
@pytest.mark.parametrize(
    ("flag", "name"),
    [
        ("--prefill-attention-backend", "fa4"),
        ("--decode-attention-backend", "fa4"),
        *((BACKEND_FLAGS[1], name) for name in ATTENTION if name != "torch"),
    ],
)
def test_no_other_backend_flag_slips_through(
    flag: str, name: str, resolve: Any, folders: Any
) -> None:
    """One line, as every ConfigError (tests/serving/start/test_one_line_errors.py)."""
    argv = on_this_machine(local(flags(LINE), folders))
    with refused(flag, name):
        resolve([*argv, flag, name])


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plain CPU would not overlap."""
    monkeypatch.setenv(OVERLAP, "1")


@needs_plain_cpu
@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("name", PUBLISHED)
def test_with_the_backend_of_this_machine_it_resolves_to_our_worker(
    name: str, resolve: Any, folders: Any
) -> None:
    server_args = resolve([*on_this_machine(local(flags(PUBLISHED[name]), folders)), *WINDOW])
    assert resolved_fields(server_args) == ASKED and serving(server_args) == "ours"


class Stopped(Exception):
    """A server was about to be launched."""


@needs_plain_cpu
@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.filterwarnings("ignore:'python -m sglang.launch_server' is still supported")
@pytest.mark.parametrize(
    "how", ["python -m sglang.launch_server", "sglang serve", "sglang serve, model first"]
)
def test_every_command_line_reaches_the_server(
    how: str, resolve: Any, folders: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sglang.cli.main
    import sglang.cli.serve
    import sglang.srt.entrypoints.http_server
    import sglang.srt.utils

    def stop(server_args: Any) -> None:
        raise Stopped(server_args)

    # What follows the resolution; and the clean-up, which would end every child of this process.
    monkeypatch.setattr(sglang.srt.entrypoints.http_server, "launch_server", stop)
    for module in (sglang.srt.utils, sglang.cli.serve):
        monkeypatch.setattr(module, "kill_process_tree", lambda *_args, **_kwargs: None)
    argv = [*on_this_machine(local(flags(LINE), folders)), *WINDOW]
    if how.endswith("first"):
        argv = argv[1:]
    serve = how.startswith("sglang serve")
    monkeypatch.setattr(
        sys, "argv", ["sglang", "serve", *argv] if serve else ["launch_server", *argv]
    )
    with pytest.raises(Stopped) as stopped:
        if serve:
            sglang.cli.main.main()
        else:
            runpy.run_module("sglang.launch_server", run_name="__main__")
    assert resolved_fields(stopped.value.args[0]) == ASKED
