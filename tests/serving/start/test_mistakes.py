"""Mistakes: at most three lines of ours, which name the flag, its value and what to do."""

from __future__ import annotations

import json
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from sglang_dflash.common.errors import ConfigError
from sglang_dflash.tools import cli
from sglang_dflash.tools.demo_pairs.pairs import demo_pair

PAIR = demo_pair("dense")
DRAFT, ALGORITHM = "--speculative-draft-model-path", "--speculative-algorithm"


def server(target: Path = PAIR.target, draft: Path | None = PAIR.draft, *more: str) -> list[str]:
    given = [] if draft is None else [DRAFT, str(draft)]
    return ["--model-path", str(target), "--speculative-algorithm", "DFLASH", *given, *more]


def inspect(*more: str) -> list[str]:
    return ["inspect", str(PAIR.target), str(PAIR.draft), "--offline", *more]


# What was typed, for a server or for our command, and what has to be told.
MISTAKES: dict[str, tuple[list[str], list[str]]] = {
    "flag with a typo": (
        server(PAIR.target, PAIR.draft, "--speculative-draft-windw-size", "64"),
        ["--speculative-draft-windw-size", "did you mean --speculative-draft-window-size?"],
    ),
    "flag of ours with a typo": (
        inspect("--windw", "64"), ["--windw: there is no such flag; did you mean --window?"]
    ),
    "verb with a typo": (["inspct"], ["'inspct'; did you mean inspect?"]),
    "block of 100": (
        inspect("--block-size", "100"),
        ["--block-size: 100 is more than the 8 ", "give 8, or leave it out"],
    ),
    "window beyond the context": (
        inspect("--window", "99999"),
        ["--window: 99999 is the whole of a context of 32768", "give less, or leave it out"],
    ),
    "draft folder with a typo": (
        server(draft=PAIR.draft.with_name("draff")),
        [f"{DRAFT}: '", "/draff'; there is no such folder", "did you mean '", "dense/draft'?"],
    ),
    "target folder with a typo": (
        server(PAIR.target.with_name("targt")),
        ["--model-path: ", "/targt'; there is no such folder", "did you mean '", "dense/target'?"],
    ),
    "no draft": (
        server(draft=None),
        [DRAFT + ": give a folder or a hub name: no draft is known", "Qwen/Qwen3.6-27B"],
    ),
    "wrong dtype": (
        server(PAIR.target, PAIR.draft, "--dtype", "float31"),
        ["--dtype: 'float31'; did you mean float32?"],
    ),
    "algorithm with a typo": (
        [*server(), ALGORITHM, "dflahs"], [f"{ALGORITHM}: 'DFLAHS'; did you mean DFLASH?"],
    ),
    "algorithm of the draft's version": (
        [*server(), ALGORITHM, "DFlash2"], [f"{ALGORITHM}: 'DFLASH2'; did you mean DFLASH?"],
    ),
    "algorithm that there is none of": (
        [*server(), ALGORITHM, "MAGIC"], [f"{ALGORITHM}: 'MAGIC'; choose one of DFLASH, ", "NGRAM"],
    ),
    "port in use": (
        server(PAIR.target, PAIR.draft, "--port", "PORT"),
        ["--port: PORT; another program listens there, at 127.0.0.1", "give another port"],
    ),
    "port in use, in short": (
        server(PAIR.target, PAIR.draft, "--por=PORT"),
        ["--port: PORT; another program listens there, at 127.0.0.1"],
    ),
    "no chat template": (
        ["generate", "--chat", "--prompt", "Hello", "--target", "BARE", "--draft", str(PAIR.draft)],
        ["--chat: 'BARE'; this model has no chat template; send the prompt as plain text"],
    ),
}  # fmt: skip


@contextmanager
def listening() -> Iterator[str]:
    """A port that a program listens on."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield str(taken.getsockname()[1])


def told_by_a_server(
    argv: list[str], resolve: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> str:
    try:
        resolve(argv)
    except ConfigError as error:
        return f"sglang-dflash: {error}"
    except SystemExit as ended:
        assert ended.code == 2
    return capsys.readouterr().err


def told_by_the_command(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Return the command's refusal, or its warning."""
    try:
        cli.main(argv)
    except SystemExit as ended:
        assert ended.code == 2
    shown = capsys.readouterr()
    if shown.err:
        return shown.err
    notes = next(part for part in shown.out.split("\n\n") if "warning: " in part)
    return notes[notes.index("warning: ") :]


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_told_in_three_lines_at_most(
    mistake: str,
    resolve: Callable[..., Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    argv, words = MISTAKES[mistake]
    bare = tmp_path / "bare"
    if "BARE" in argv:
        shutil.copytree(PAIR.target, bare)
        (bare / "chat_template.jinja").unlink(missing_ok=True)
        tokenizer = json.loads((bare / "tokenizer_config.json").read_text())
        tokenizer.pop("chat_template", None)
        (bare / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    # Under pytest no server would listen.
    monkeypatch.setattr(sys, "argv", ["sglang/launch_server.py"])
    with listening() as port:
        filled = [word.replace("PORT", port).replace("BARE", str(bare)) for word in argv]
        of_server = argv[0] == "--model-path"
        told = (
            told_by_a_server(filled, resolve, capsys)
            if of_server
            else told_by_the_command(filled, capsys)
        )
    assert len(told.strip().splitlines()) <= 3 and "Traceback" not in told and "usage" not in told
    told = " ".join(told.split())
    for word in words:
        assert word.replace("PORT", port).replace("BARE", str(bare)) in told, told


def test_another_command_line_with_that_port_is_not_refused(resolve: Callable[..., Any]) -> None:
    """SGLang's benchmarks take a server's flags, and listen nowhere."""
    with listening() as port:
        resolve([*server(), "--port", port])


def test_the_algorithm_of_another_plugin_is_not_refused(
    resolve: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang.srt.speculative import spec_registry
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    monkeypatch.setattr(spec_registry, "_REGISTRY", dict(spec_registry._REGISTRY))
    SpeculativeAlgorithm.register("DFLASH_TREE", supports_overlap=True)(lambda _: object)
    resolve([*server(), ALGORITHM, "dflash_tree"])
