"""The command itself: version, help, and what they cost."""

from __future__ import annotations

import importlib.metadata
import resource
import subprocess
import sys

import pytest

import sglang_dflash
from sglang_dflash.tools import cli

COMMAND = [sys.executable, "-m", "sglang_dflash"]


def test_the_version_of_the_package() -> None:
    version = importlib.metadata.version("sglang-dflash")
    done = subprocess.run([*COMMAND, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"sglang-dflash {version}\n" and sglang_dflash.__version__ == version
    with pytest.raises(AttributeError, match="no attribute 'nonesuch'"):
        _ = sglang_dflash.nonesuch


def test_help_takes_little_time() -> None:
    """Processor time, the smallest of three: other processes may use the machine."""

    def seconds() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([*COMMAND, "inspect", "--help"], check=True, stdout=subprocess.DEVNULL)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    assert min(seconds() for _ in range(3)) < 0.3


def test_only_what_a_verb_needs_is_imported() -> None:
    code = (
        "import sys; from sglang_dflash.tools.cli import main\n"
        "assert main(['demo-models', 'dense']) == 0\n"
        "loaded = {name for name in sys.modules if name.startswith('sglang_dflash.')}\n"
        "assert not loaded & {'sglang_dflash.tools.bench', 'sglang_dflash.tools.inspect'}, loaded\n"
        "for argv in (['--help'], ['generate', '--help'], ['bench', '--help']):\n"
        "    try: main(argv)\n"
        "    except SystemExit: pass\n"
        "assert not {'torch', 'transformers', 'sglang', 'matplotlib'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.count("usage: sglang-dflash") == 3


@pytest.mark.parametrize("name", cli.VERBS)
def test_every_verb_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        cli.main([name, "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert done.value.code == 0 and f"sglang-dflash {name}" in shown and cli.VERBS[name] in shown


def test_an_unknown_verb_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        cli.main(["nonesuch"])
    assert done.value.code == 2 and "verb: 'nonesuch'; choose one of env" in capsys.readouterr().err


def test_a_reader_that_stops_early_is_no_error() -> None:
    shown = subprocess.Popen(
        [*COMMAND, "demo-models", "dense"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert shown.stdout is not None and shown.stderr is not None
    shown.stdout.close()
    assert shown.stderr.read() == "" and shown.wait() == 0
