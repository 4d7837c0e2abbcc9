"""The command itself: version, help, and what they cost."""

from __future__ import annotations

import importlib.metadata
import resource
import subprocess
import sys

import pytest

from sglang_dflash import cli


@pytest.mark.parametrize("package", ["sglang_dflash", "sglang_dflash.cli"])
def test_the_package_runs_as_a_module(package: str) -> None:
    shown = subprocess.run(
        [sys.executable, "-m", package, "--version"], capture_output=True, text=True, check=True
    ).stdout
    assert shown == f"sglang-dflash {importlib.metadata.version('sglang-dflash')}\n"


def test_the_version_of_the_package() -> None:
    import sglang_dflash

    assert sglang_dflash.__version__ == importlib.metadata.version("sglang-dflash")
    with pytest.raises(AttributeError, match="no attribute 'nonesuch'"):
        _ = sglang_dflash.nonesuch


@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["inspect", "--help"]])
def test_version_and_help_take_little_time(arguments: list[str]) -> None:
    """Processor time, the smallest of three: other processes may use the machine."""

    def seconds() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        command = [sys.executable, "-m", "sglang_dflash", *arguments]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    assert min(seconds() for _ in range(3)) < 0.3


def test_only_the_module_of_the_command_is_loaded() -> None:
    code = (
        "import sys\nfrom sglang_dflash.cli import main\n"
        "assert main(['demo-models', 'dense']) == 0\n"
        "loaded = {name for name in sys.modules if name.startswith('sglang_dflash.')}\n"
        "assert not loaded & {'sglang_dflash.bench', 'sglang_dflash.inspect'}, loaded"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


@pytest.mark.parametrize("name", cli.VERBS)
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        cli.main([name, "--help"])
    assert done.value.code == 0 and f"sglang-dflash {name}" in capsys.readouterr().out


def test_an_unknown_command_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        cli.main(["nonesuch"])
    assert done.value.code == 2 and "invalid choice: 'nonesuch'" in capsys.readouterr().err


def test_a_reader_that_stops_early_is_no_error() -> None:
    shown = subprocess.Popen(
        [sys.executable, "-m", "sglang_dflash", "demo-models", "dense"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert shown.stdout is not None and shown.stderr is not None
    shown.stdout.close()
    assert shown.stderr.read() == "" and shown.wait() == 0
