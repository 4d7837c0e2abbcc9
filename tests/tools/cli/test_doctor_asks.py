"""Flags, key and proxy with which `sglang-dflash doctor` asks a server."""

from __future__ import annotations

import os

import pytest

from sglang_dflash.tools.bench.server import free_port
from tests.tools.cli.test_doctor import doctor, reading, serving, shown


@pytest.mark.parametrize(
    "argv", [("--timeout", "0"), ("--timeout", "-1"), ("--timeout", "nan"), ("--api-key", "ключ")]
)
def test_what_cannot_be_asked_with_is_one_line(
    argv: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = doctor(capsys, *argv)
    assert status == 1 and not out and err.startswith(f"sglang-dflash: {argv[0]}: ")
    assert len(err.splitlines()) == 1 and "ключ" not in err


def test_a_proxy_is_not_asked_for_this_machine(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{free_port()}")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, "intranet")
    with serving(shown(reading())) as url:
        assert doctor(capsys, url)[0] == 0
        # Other hosts are asked by it, and an error names it.
        _, out, _ = doctor(capsys, "http://nowhere.invalid")
    assert "the proxy of the environment: " in out and os.environ["no_proxy"].startswith("intranet")
