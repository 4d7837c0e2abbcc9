"""Command lines of a server that are refused before SGLang is imported."""

from __future__ import annotations

import multiprocessing
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_dflash.serving.start import launch
from sglang_dflash.tools.demo_pairs.pairs import demo_pair
from tests.broken_drafts import BROKEN

PAIR = demo_pair("dense")
TARGET, DRAFT = str(PAIR.target), str(PAIR.draft)
SERVER = "/env/sglang/launch_server.py"
DFLASH = ["--speculative-algorithm", "DFLASH"]


def argv(*words: str, program: tuple[str, ...] = (SERVER,)) -> list[str]:
    return [*program, *words]


def served(target: str, *draft: str) -> list[str]:
    words = ["--model-path", target, *DFLASH]
    return [*words, *(["--speculative-draft-model-path", *draft] if draft else [])]


WRONG = {
    "no target": (served("/nonesuch/model", DRAFT), "--model-path: '/nonesuch/model'; there is no"),
    "no draft": (served(TARGET), "--speculative-draft-model-path: give a folder or a hub name"),
    "no draft's folder": (
        served(TARGET, "./nonesuch/draft"), "--speculative-draft-model-path: './nonesuch/draft'",
    ),
    "swapped": (served(DRAFT, TARGET), "this is a draft: give it as --speculative-draft"),
}  # fmt: skip


@pytest.mark.parametrize("program", [(SERVER,), ("/bin/sglang", "serve")], ids=str)
@pytest.mark.parametrize("what", WRONG)
def test_what_could_not_start_ends_in_one_line(what: str, program: tuple[str, ...]) -> None:
    words, message = WRONG[what]
    with pytest.raises(SystemExit, match="sglang-dflash: ") as ended:
        launch.refuse_early(argv(*words, program=program))
    assert message in str(ended.value) and "\n" not in str(ended.value)


def test_a_draft_for_another_target_does(tmp_path: Path) -> None:
    draft = BROKEN["field: hidden_size=256"].make(tmp_path / "draft")
    with pytest.raises(SystemExit, match="hidden_size"):
        launch.refuse_early(argv(*served(TARGET, str(draft))))
    # SGLang's worker judges by itself.
    builtin = ("--speculative-dflash-worker", "builtin")
    launch.refuse_early(argv(*served(TARGET, str(draft)), *builtin))


@pytest.mark.parametrize(
    "words", [["-h"], ["--help"], ["--hel"], ["--config", "server.yaml"]], ids=str
)
@pytest.mark.parametrize("what", WRONG)
def test_help_and_a_file_of_flags_are_left_to_the_parser(what: str, words: list[str]) -> None:
    launch.refuse_early(argv(*WRONG[what][0], *words))


@pytest.mark.parametrize(
    "words",
    [
        ["--model-path", TARGET, *DFLASH, "--speculative-draft-model-p", DRAFT],
        ["--model-path", TARGET, *DFLASH, f"--speculative-draft-mod={DRAFT}"],
        ["--model-path=" + TARGET, *DFLASH, "--speculative-algo", "EAGLE"],
    ],
    ids=str,
)
def test_a_flag_in_short_is_not_missed(words: list[str]) -> None:
    """argparse takes the beginning of a flag for it."""
    launch.refuse_early(argv(*words))


def test_nor_is_a_target_without_a_flag() -> None:
    words = [DRAFT, "--model-type", "llm", *DFLASH, "--speculative-draft-model-path", TARGET]
    with pytest.raises(SystemExit, match="this is a draft"):
        launch.refuse_early(argv(*words, program=("/bin/sglang", "serve")))


def test_flags_of_other_plugins_and_bad_values_are_left_to_the_parser() -> None:
    launch.refuse_early(argv(*served(TARGET, DRAFT), "--flag-of-a-plugin", "1"))
    launch.refuse_early(argv(*served("/nonesuch/model", DRAFT), "--tp-size", "two"))


def test_a_used_port_is_left_to_the_parser() -> None:
    """It knows whether help is asked for, and all spellings of the port."""
    with socket.create_server(("127.0.0.1", 0)) as used:
        port = str(used.getsockname()[1])
        for words in (["-h"], ["--model-path", TARGET]):
            launch.refuse_early(argv(*words, "--port", port))


@pytest.mark.parametrize(
    "words",
    [
        served(TARGET, DRAFT),
        served("Qwen/Qwen3-8B", "a/b"),
        pytest.param(served(5000 * "x", DRAFT), id="a name longer than any path"),
        # Plain decoding, and flags of a file.
        ["--model-path", TARGET],
        ["--config", "server.yaml", *DFLASH, "--model-path", TARGET],
        # Negative numbers and short flags are no part of a path.
        ["--model-path", TARGET, "-x", "--seed", "-1"],
        # The target's hidden states for a trainer of drafts, without a draft.
        [*served(TARGET), "--enable-return-aux-hidden-states",
         "--return-aux-hidden-state-layer-ids", "1", "2"],
    ],
    ids=str,
)  # fmt: skip
def test_the_rest_goes_on(words: list[str]) -> None:
    launch.refuse_early(argv(*words))


@pytest.mark.parametrize("program", [("/bin/sglang", "generate"), ("/bin/pytest",)], ids=str)
def test_other_programs_go_on(program: tuple[str, ...]) -> None:
    launch.refuse_early([*program, *WRONG["no target"][0]])


def test_a_servers_children_are_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: object())
    launch.refuse_early(argv(*WRONG["no target"][0]))


def test_it_imports_no_engine() -> None:
    code = (
        f"import sys; from sglang_dflash.serving.start.launch import refuse_early\n"
        f"refuse_early({argv(*served(TARGET, DRAFT))!r})\n"
        "assert not {'torch', 'sglang', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
