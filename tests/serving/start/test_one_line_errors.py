"""A server that cannot be started ends with one line."""

from __future__ import annotations

import logging
import multiprocessing
import signal
import subprocess
import sys
import time

import pytest
from sglang.srt.utils.common import kill_process_tree

from sglang_dflash.common.errors import ConfigError
from sglang_dflash.serving.start.one_line_errors import ends_the_server, use_one_line

NO_PROCESS = 2**31 - 1


def test_our_errors_are_shown_in_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    use_one_line()
    for error in (ConfigError("a: 1; 2 is required"), ValueError("not ours")):
        try:
            raise error
        except ValueError as caught:
            sys.excepthook(type(caught), caught, caught.__traceback__)
    first, *others = capsys.readouterr().err.splitlines()
    assert first == "sglang-dflash: a: 1; 2 is required"
    assert others[0].startswith("Traceback") and others[-1] == "ValueError: not ours"


def test_sglang_logs_no_line_before_ours(caplog: pytest.LogCaptureFixture) -> None:
    """Its launcher kills its children in a `finally`, which it logs."""
    caplog.set_level(logging.INFO)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sys, "excepthook", sys.__excepthook__)
        use_one_line()
    for error, lines in ((ConfigError("a"), 0), (ValueError("not ours"), 1)):
        caplog.clear()
        with pytest.raises(type(error)):
            try:
                raise error
            finally:
                kill_process_tree(NO_PROCESS, include_parent=False)
        assert len(caplog.records) == lines


def test_a_command_line_uses_it() -> None:
    code = (
        "import argparse\nfrom types import SimpleNamespace\n"
        "from sglang_dflash.serving.start import flags\n"
        "typed = argparse.Namespace(speculative_dflash_worker='mine')\n"
        "flags.keep_flags(SimpleNamespace(), None, typed)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 1 and done.stdout == ""
    assert line.startswith("sglang-dflash: --speculative-dflash-worker: 'mine'; choose one of ")


def _scheduler() -> None:
    logging.basicConfig(format="%(message)s", force=True)
    with ends_the_server({"flag": "typed"}):
        raise ConfigError("flag", 1, "2 is required")


def test_a_scheduler_process_ends_its_parent_as_sglang_does(
    capfd: pytest.CaptureFixture[str],
) -> None:
    received: list[int] = []
    before = signal.signal(signal.SIGQUIT, lambda number, _frame: received.append(number))
    try:
        child = multiprocessing.get_context("fork").Process(target=_scheduler)
        child.start()
        child.join(30)
        deadline = time.monotonic() + 10
        while not received and time.monotonic() < deadline:
            time.sleep(0.01)
    finally:
        signal.signal(signal.SIGQUIT, before)
    assert received == [signal.SIGQUIT] and child.exitcode == 1
    shown = capfd.readouterr().err
    assert "sglang-dflash: ERROR: typed: 1; 2 is required" in shown and "Traceback" not in shown


def test_elsewhere_the_error_is_raised() -> None:
    with pytest.raises(ConfigError, match="of an engine"), ends_the_server({}):
        raise ConfigError("of an engine")
