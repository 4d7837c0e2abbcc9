"""A server's command line, and a file of its flags, are read as SGLang reads them."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import pytest
from sglang.cli.serve import _extract_model_type_override, _normalize_positional_model_path
from sglang.srt.utils.common import human_readable_int
from sglang.srt.utils.server_args_config_parser import ConfigArgumentMerger

from launch.server_flags import as_text, describe_flags, server_parser
from sglang_dflash.serving.start import flag_file, server_flags
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


FILES = {
    "flags": "model-path: a/b\nTP: 2\nspeculative_dflash_width: fixed\n",
    "numbers": "mem-fraction-static: 0.8\nseed: -1\ncontext-length: 64k\nport: 1_000\n",
    "switches": "enable-lora: true\nskip_tokenizer_init: false\ntrust-remote-code: yes\n",
    "a truth for a flag with a value": "speculative-dflash-lookup: on\nhost: false\n",
    "lists": "cuda-graph-bs-decode: [1, 2, 4]\nstop: []\nlora-target-modules:\n- all\n- 'no'\n",
    "an object": "preferred-sampling-params: {top_k: 1, stop: [a]}\nmodel: null\n",
    "unknown": "frobnicate: 3\n",
    "empty": "# nothing\n",
    "on or off": "enable-fused-qk-norm-rope: true\n",
    "off": "no_enable_fused_qk_norm_rope: true\n",
    "adapters": "lora-paths: [x=y]\n",
    "another kind of switch": "disable_cuda_graph: true\n",
    "a list at the top": "- model-path\n",
    "a text": "model-path",
    "a number as a flag": "1: 2\n",
    "a date": "preferred-sampling-params: {a: 2024-01-01}\n",
    "a circle": "preferred-sampling-params: &a {a: *a}\n",
    "no YAML": "a: [1,\nb: }\n",
    "too deep": "[" * 10_000,
    "bytes": "\udcff",
}
LINES = {
    "behind": ["--model-path", "a/b", "--config", "FILE"],
    "between": ["--seed", "3", "--config", "FILE", "--tp", "1"],
    "twice": ["--config", "FILE", "--config", "FILE"],
    "no file": ["--tp", "1", "--config"],
    "one word": ["--config=FILE"],
}
CASES = [(name, "server.yaml", "between") for name in FILES]
CASES += [("flags", "server.YML", line) for line in LINES]
CASES += [("flags", name, "behind") for name in ("server.json", "server")]
CASES += [(name, "server.yaml", "behind") for name in ("missing", "folder")]


@pytest.mark.parametrize(("content", "name", "line"), CASES)
def test_a_file_of_flags_is_read_as_sglang_reads_it(
    sglangs: argparse.ArgumentParser, tmp_path: Path, content: str, name: str, line: str
) -> None:
    path = tmp_path / name
    if content == "folder":
        path.mkdir()
    elif content != "missing":
        path.write_bytes(FILES[content].encode("utf-8", "surrogateescape"))
    words = [word.replace("FILE", str(path)) for word in LINES[line]]
    try:
        expected = ConfigArgumentMerger(sglangs).merge_config_with_args(words)
    except Exception:
        with refused(flag_file.FLAG) as error:
            flag_file.with_file(words, server_flags.rows())
        assert "\n" not in str(error.value) and (line != "behind" or str(path) in str(error.value))
        return
    assert flag_file.with_file(words, server_flags.rows()) == expected


def test_what_is_typed_counts_more_than_the_file(tmp_path: Path) -> None:
    path = tmp_path / "server.yaml"
    path.write_text("model: a/b\ntp: 2\nrandom-seed: 4\n")
    words = ["--tp", "1", "--config", str(path)]
    expected = {"model_path": "a/b", "tp_size": 1, "random_seed": 4}
    assert server_flags.settings_of([*PROGRAM, *words]) == expected


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
