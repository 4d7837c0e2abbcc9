"""Every command that README and docs print is tried here or in the test that `ELSEWHERE` names."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import re
import shlex
import subprocess
from collections.abc import Callable

import pytest

from experiments import runner
from sglang_dflash.checkpoint.origin import published_draft
from sglang_dflash.common.command_line import given
from sglang_dflash.tools import cli
from sglang_dflash.tools.bench import datasets, published
from sglang_dflash.tools.bench.settings import BenchSettings
from tests.commands import ROOT, Printed, commands

DRAFTING = "--speculative-algorithm DFLASH --speculative-draft-model-path DRAFT"
ENGINE = "tests/engine/test_as_installed.py::"

# Commands that are run by another test, or not at all: what they begin with -> where or why.
ELSEWHERE = {
    "pip install sglang-router": "what it does is tested by tests/engine/test_router.py",
    "torchrun ": "tests/tools/bench/test_published_pair.py",
    "python -m sglang_router": "tests/engine/test_router.py",
    "pip install mooncake": "tests/engine/test_disaggregation.py",
    "pip install vllm": "needs a GPU and the network; tests/tools/bench/test_vllm.py has a fake",
    "pip install accelerate": "a package of the index; our own code does not need it",
    "sglang-dflash env": "tests/engine/test_env.py",
    "curl http": ENGINE + "test_the_readmes_clients_get_an_answer",
    "pip install -e .": "launch/setup.sh, which every test run begins with",
    "python launch/mutate.py": "tests/reliability/test_mutations.py",
    "python launch/docs_tables.py": "tests/launch/test_docs_tables.py",
    "python -m launch.server_flags": "tests/serving/start/test_server_flags.py",
    "python launch/train_draft.py": "tests/launch/test_train_draft.py",
    "sglang serve --model-path TARGET --skip-tokenizer-init": "serves without a draft: "
    "tests/engine/test_text_writer.py",
    "python -m experiments lookup --recorded": "tests/experiments/test_recorded.py",
    "sglang-dflash demo-models smollm2": "needs the network: tests/tools/demo_pairs",
    "python -m tests.promises": "tests/test_promises.py",
    "python -m tests.kernels.compile_kernels": "minutes; test_resources.py reads its table",
    "sglang-dflash check-gpu": "needs a GPU: tests/tools/cli/test_check_gpu.py",
    "sglang-dflash doctor": "needs a server: tests/tools/cli/test_doctor.py",
    "pipx run pip-audit": "asks the network for known defects",
    "python -m sglang.check_env": "SGLang's own, for machines with a GPU",
    "uv pip": "a mention, and a maintainer's command; both need the network",
    "pre-commit install": "changes the checkout's git hooks",
    "source .venv/bin/activate": "launch/setup.sh made it",
    "git grep": "a search for a maintainer to read",
    "python -m tests.fake_gpu": "tests/engine/test_gpu_path.py",
    "pip wheel": "minutes, and needs the network",
    "pip install --no-index": "of what `pip wheel` has made",
    "pip download": "the beginning of a maintainer's command, and needs the network",
}


def parsed_by_sglang(command: Printed) -> None:
    """The arguments of a launch command; without arguments it is a mention."""
    arguments = command.words[2:] if command.words[0] == "sglang" else command.words[3:]
    if arguments in ([], ["--help"]) or "..." in arguments:
        return
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.server_args import prepare_server_args

    args = prepare_server_args(arguments)
    assert args.speculative_algorithm == "DFLASH"
    # Without one, the draft that is published for the target serves.
    assert args.speculative_draft_model_path or published_draft(args.model_path)


def script_is_valid(command: Printed) -> None:
    script = ROOT / command.words[1]
    assert script.is_file()
    subprocess.run(["bash", "-n", str(script)], check=True)


def its_tests_exist(command: Printed) -> None:
    named = [word for word in command.words if word.startswith("tests/")]
    assert named
    for test in named:
        file, _, name = test.partition("::")
        found = ROOT / file
        assert found.exists() and (not name or name in found.read_text())


def experiment_takes_the_options(command: Printed) -> None:
    name, *options = command.words[3:]
    if name == "NAME":
        return
    if name == "--help":
        return
    if name in runner.experiments():
        runner.parser(name).parse_args(options)
    else:
        its_commit_is_named(command)


def its_commit_is_named(command: Printed) -> None:
    """Check that the page names the commit of an experiment or a recipe that is gone."""
    assert f"`{command.text}` at commit " in (ROOT / command.page).read_text()


def bench_takes_the_options(command: Printed) -> None:
    """Parse them, and the servers' flags after `--`; a local data set has as many prompts as
    requests run at a time on a GPU."""
    parser = argparse.ArgumentParser()
    cli.module("bench").arguments(parser)
    words, flags = cli.module("bench").split(command.words[2:], ())
    if flags:
        served = f"sglang serve --model-path TARGET {DRAFTING} {shlex.join(flags)}"
        parsed_by_sglang(Printed(command.page, served))
    words = [word.replace("=URL", "=http://x") for word in words]
    asked = given(parser.parse_args(words), BenchSettings)
    settings = BenchSettings.for_machine(asked, accelerator=True)
    for name in set(settings.datasets) - set(datasets.HUB):
        prompts = datasets.load(name, settings.num_prompts, model=settings.embedded)
        assert len(prompts) >= max(settings.levels), name


def benchmark_takes_the_options(command: Printed) -> None:
    """A command without arguments is a mention."""
    if len(command.words) > 3:
        published.command_line().parse_args(command.words[3:])


def runs(command: Printed) -> None:
    """The verb of our command; one whose arguments are placeholders is a mention."""
    words = command.words[1:]
    if len(words) == 1:
        assert words[0] in cli.VERBS
    elif not {"TARGET", "DRAFT"} & set(words):
        assert cli.main(words) == 0


def drafts_well(command: Printed) -> None:
    """The prompt shown is one that the pair has memorized."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert cli.main([*command.words[1:], "--json"]) == 0
    assert json.loads(out.getvalue())["acceptance_length"] > 4


# The first that matches.
CHECKS: dict[str, Callable[[Printed], None]] = {
    r"sglang serve|python -m sglang\.launch_server": parsed_by_sglang,
    r"python -m experiments ": experiment_takes_the_options,
    r"python -m benchmarks |python launch/": its_commit_is_named,
    r"python -m sglang_dflash\.benchmark": benchmark_takes_the_options,
    r"bash ": script_is_valid,
    r"(python -m )?pytest ": its_tests_exist,
    r"sglang-dflash generate ": drafts_well,
    r"sglang-dflash bench": bench_takes_the_options,
    r"sglang-dflash ": runs,
}


@pytest.mark.parametrize("command", commands(), ids=str)
def test_a_printed_command_works(command: Printed) -> None:
    if any(command.text.startswith(start) for start in ELSEWHERE):
        return
    check = next((f for start, f in CHECKS.items() if re.match(start, command.text)), None)
    assert check is not None, "add a check, or say in ELSEWHERE where it is run"
    check(command)


def test_what_is_run_elsewhere_is_printed_and_the_test_exists() -> None:
    printed = [command.text for command in commands()]
    for start, where in ELSEWHERE.items():
        assert any(text.startswith(start) for text in printed), start
        if where.startswith("tests/"):
            file, _, test = where.partition("::")
            assert (ROOT / file).is_file() and test in (ROOT / file).read_text()


@pytest.mark.engine
@pytest.mark.skipif(
    not (ROOT / ".venv").exists(),
    reason="set up without launch/test.sh: the demo would make its own .venv",
)
def test_the_demo_script_passes_its_arguments_on() -> None:
    shown = subprocess.run(
        ["bash", str(ROOT / "launch/demo.sh"), "--help"],
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    ).stdout
    assert "--check" in shown and "--model" in shown
