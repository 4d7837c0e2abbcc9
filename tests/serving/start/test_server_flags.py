"""A server's command line is read as SGLang's own parser reads it."""

from __future__ import annotations

import argparse
import subprocess
import sys

import pytest
from sglang.cli.serve import _extract_model_type_override, _normalize_positional_model_path
from sglang.srt.utils.common import human_readable_int

from launch.server_flags import as_text, describe_flags, server_parser
from sglang_dflash.serving.start import server_flags
from tests.errors import refused

MODEL = ("--model-path", "a/b")
PROGRAM = ("python", "-m", "sglang.launch_server")


@pytest.fixture(scope="module")
def sglangs() -> argparse.ArgumentParser:
    return server_parser()


def test_the_file_has_the_flags_of_sglangs_parser(sglangs: argparse.ArgumentParser) -> None:
    """Run `python -m launch.server_flags` if it does not."""
    assert server_flags.FILE.read_text() == as_text(describe_flags(sglangs))


COMMANDS = [
    "--model a/b --tp 2 --mem-fraction-static .8",
    "--model-path=a/b --context-len 64Ki --max-total-tokens 1.5M",
    "--model-path a/b --cuda-graph-bs-decode 1 2 4 --enable-fused-qk-norm-rope",
    "--model-path a/b --no-enable-fused-qk-norm-rope --disable-cuda-graph --seed -1",
    "--model-path a/b --random-seed -1 --lora-paths x=y z --pp 2 --attention-context-parallel 2",
    "--model-path a/b --speculative-dflash-draft-window-size 9 --mamba-scheduler-strategy auto",
    '--model-path a/b --preferred-sampling-params {"top_k":1} --speculative-dflash-width fixed',
    "--model-path a/b --speculative-dflash",
    "--model-path a/b --speculative-algorithm",
    "--model-path a/b --tp two",
    "--model-path a/b --max-total-tokens 1.5Mi",
    "--model-path a/b --max-total-tokens 1.5",
    "--model-path a/b --preferred-sampling-params {",
    "--model-path a/b --kv-cache-dtype fp9",
    "--model-path a/b --log-requests-level 7",
    "--model-path a/b --enable-lora=1",
    "--model-path a/b c",
    "--model-path a/b --frobnicate 3",
]


@pytest.mark.parametrize("text", COMMANDS)
def test_it_is_read_as_sglangs_parser_reads_it(sglangs: argparse.ArgumentParser, text: str) -> None:
    words = text.split()
    try:
        given = vars(sglangs.parse_args(words))
    except SystemExit:
        with refused("launch command") as error:
            server_flags.settings_of(words)
        assert "\n" not in str(error.value)
        return
    settings = server_flags.settings_of(words)
    # SGLang makes pairs of these.
    settings.pop("lora_paths", None)
    assert settings and settings.items() <= given.items()
    others = {name for name, value in given.items() if value != sglangs.get_default(name)}
    assert others - {"lora_paths"} <= settings.keys()


@pytest.mark.parametrize(
    "text",
    ["1", "64k", "64Ki", "25.6k", "2M", "2Mi", "1G", "1Ti", "1.5Ki", "64K", "k", "1.k", "-3", "٣k"],
)
def test_units_are_sglangs(text: str) -> None:
    try:
        expected = human_readable_int(text)
    except argparse.ArgumentTypeError:
        with pytest.raises(argparse.ArgumentTypeError):
            server_flags.human_readable_int(text)
        return
    assert server_flags.human_readable_int(text) == expected


@pytest.mark.parametrize(
    "words",
    [
        ["a/b", "--tp", "2"],
        ["--tp", "2", *MODEL],
        ["--model-type", "llm", "a/b", "--tp", "2"],
        ["a/b", "--model-type=llm"],
        [],
    ],
    ids=str,
)
def test_serve_takes_a_target_without_a_flag(words: list[str]) -> None:
    _, rest = _extract_model_type_override(words)
    expected, _ = _normalize_positional_model_path(rest)
    assert server_flags.after_program(["env", "A=1", "/bin/sglang", "serve", *words]) == expected


def test_the_program_is_not_part_of_it() -> None:
    docker = ("docker", "run", "--gpus", "all", "-v", "/a:/b", "image")
    for front in (
        (),
        PROGRAM,
        (*docker, *PROGRAM),
        ("/x/launch_server.py",),
        ("python", "-m", "x"),
    ):
        assert server_flags.after_program([*front, *MODEL]) == [*MODEL]


def test_it_imports_no_engine() -> None:
    code = (
        "import sys; from sglang_dflash.serving.start.server_flags import settings_of\n"
        f"settings_of({list(MODEL)!r})\n"
        "assert not {'torch', 'sglang', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
