"""The command itself: version, help, and what they cost."""

from __future__ import annotations

import importlib.metadata
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


def test_only_what_a_verb_needs_is_imported() -> None:
    code = (
        "import sys; from sglang_dflash.tools.cli import main\n"
        "assert main(['demo-models', 'dense']) == 0\n"
        "loaded = {name for name in sys.modules if name.startswith('sglang_dflash.')}\n"
        "assert not loaded & {'sglang_dflash.tools.bench', 'sglang_dflash.tools.inspect'}, loaded\n"
        "for argv in (['--help'], ['generate', '--help'], ['inspect', '--help']):\n"
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


SERVER_BLOCK = "--speculative-num-draft-tokens"


@pytest.mark.parametrize(
    "words",
    [
        f"Qwen/Qwen3-8B {SERVER_BLOCK} 4000",
        f"Qwen/Qwen3-8B {SERVER_BLOCK}=4000",
        "Qwen/Qwen3-8B --block-size 4000",
        f"-- sglang serve --model-path Qwen/Qwen3-8B {SERVER_BLOCK} 4000 "
        "--speculative-algorithm DFLASH",
    ],
)
def test_an_error_names_the_flag_as_it_was_typed(
    words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flag = SERVER_BLOCK if SERVER_BLOCK in words else "--block-size"
    assert cli.main(["inspect", "--offline", *words.split()]) == 1
    assert capsys.readouterr().err.startswith(f"sglang-dflash: {flag}: 4000; ")
