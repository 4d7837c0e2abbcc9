"""The launch commands of the model cards, as printed, through SGLang's own parser and resolution, by every way of starting it."""

from __future__ import annotations

import ast
import itertools
import json
import os
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang_dflash.checkpoint.embedded import demo_pair
from sglang_dflash.core.weights import save_model
from tests.conftest import random_model, raw_config
from tests.engine.hybrid import SHAPE

LAUNCH = Path(__file__).parents[2] / "launch"
LINE = """python -m sglang.launch_server --model-path Qwen/Qwen3.5-27B --speculative-algorithm DFLASH \\
    --speculative-draft-model-path z-lab/Qwen3.5-27B-DFlash --speculative-num-draft-tokens 16 --tp-size 1 \\
    --attention-backend fa3 --mem-fraction-static 0.75 --mamba-scheduler-strategy extra_buffer --trust-remote-code"""
BLACKWELL = "--attention-backend trtllm_mha --speculative-draft-attention-backend fa4"
PUBLISHED = {
    "qwen3.5-27b": LINE,
    "qwen3.5-35b-a3b": LINE.replace("Qwen3.5-27B", "Qwen3.5-35B-A3B").replace(
        "--attention-backend fa3", BLACKWELL
    ),
    "qwen3.6-27b": LINE.replace("Qwen3.5-27B", "Qwen3.6-27B"),
    "qwen3.6-35b-a3b": LINE.replace("Qwen3.5-27B", "Qwen3.6-35B-A3B"),
}
# Published nowhere: the first command less what is for recurrent layers.
QWEN3 = LINE.replace("Qwen3.5-27B-DFlash", "Qwen3-8B-DFlash-b16").replace("Qwen3.5-27B", "Qwen3-8B")
SCRIPTS = {**PUBLISHED, "qwen3-8b": QWEN3.replace("--mamba-scheduler-strategy extra_buffer ", "")}
WINDOW = ["--speculative-dflash-draft-window-size", "4096"]
MODELS = ("--model-path", "--speculative-draft-model-path")
BACKENDS = ("--attention-backend", "--speculative-draft-attention-backend")


def flags(command: str) -> list[str]:
    return shlex.split(command.replace("\\\n", " "))[3:]


def with_values(argv: list[str], **values: str) -> list[str]:
    """`argv` with the values of those flags that it has replaced."""
    of = {f"--{name.replace('_', '-')}": value for name, value in values.items()}
    return [of.get(before, word) for before, word in zip(["", *argv], argv, strict=False)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Tiny stand-ins: the published architectures, dense and with experts, a dense Qwen3, and a draft for each."""
    import transformers

    root = tmp_path_factory.mktemp("published")
    experts = {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
    }
    configs: dict[str, Any] = {
        "27b": (
            transformers.Qwen3_5TextConfig(**SHAPE, intermediate_size=128),
            "Qwen3_5ForCausalLM",
        ),
        "a3b": (transformers.Qwen3_5MoeTextConfig(**SHAPE, **experts), "Qwen3_5MoeForCausalLM"),
    }
    for name, (config, architecture) in configs.items():
        # Published configurations have it, and SGLang goes by it rather than by `layer_types`.
        config.architectures, config.full_attention_interval = [architecture], 4
        config.save_pretrained(root / name)
        for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
            shutil.copy(demo_pair("dense").target / file, root / name)
    # Made for half the positions of the targets, as published drafts are made for fewer than theirs.
    raw = raw_config(hidden_size=64, vocab_size=1024, num_target_layers=4, block_size=16)
    save_model(random_model(raw), raw, root / "draft", torch.float32)
    dense = demo_pair("dense")
    return {
        **{name: str(root / name) for name in (*configs, "draft")},
        "8b": str(dense.target),
        "8b-draft": str(dense.draft),
    }


def local(argv: list[str], folders: dict[str, str]) -> list[str]:
    """`argv` with its two model paths replaced, and nothing else."""
    kind = argv[argv.index("--model-path") + 1].lower().rsplit("-", 1)[-1]
    return with_values(
        argv,
        model_path=folders[kind],
        speculative_draft_model_path=folders["8b-draft" if kind == "8b" else "draft"],
    )


def on_this_machine(argv: list[str]) -> list[str]:
    """And with the backends that a plain CPU has."""
    return with_values(
        argv, attention_backend="torch_native", speculative_draft_attention_backend="torch_native"
    )


@pytest.fixture(scope="module")
def resolve() -> Callable[[list[str]], Any]:
    from sglang.srt.plugins import load_plugins

    load_plugins()

    def of(argv: list[str]) -> Any:
        from sglang.srt.server_args import prepare_server_args

        server_args = prepare_server_args(argv)
        server_args.resolve_once()
        return server_args

    return of


ASKED = {
    "speculative_algorithm": "DFLASH",
    "speculative_num_draft_tokens": 16,
    "tp_size": 1,
    "mem_fraction_static": 0.75,
    "mamba_radix_cache_strategy": "extra_buffer",
    "trust_remote_code": True,
    "speculative_draft_window_size": 4096,
    "disable_overlap_schedule": False,
}


def resolved_fields(server_args: Any) -> dict[str, Any]:
    from sglang.srt.arg_groups.overrides import resolving_view

    settings = resolving_view(server_args)
    return {name: getattr(settings, name) for name in ASKED}


needs_plain_cpu = pytest.mark.skipif(
    torch.cuda.is_available(), reason="this machine has the published backends"
)


@pytest.mark.parametrize("name", SCRIPTS)
def test_parses_as_printed(name: str, resolve: Any) -> None:
    from sglang.srt.server_args import prepare_server_args

    argv = flags(SCRIPTS[name])
    given = prepare_server_args([*argv, *WINDOW])
    for flag, value in itertools.pairwise(argv):
        if flag in (*MODELS, *BACKENDS):
            assert getattr(given, flag[2:].replace("-", "_")) == value
    assert {
        field: getattr(given, field) for field in ASKED if field != "mamba_radix_cache_strategy"
    } == {field: value for field, value in ASKED.items() if field != "mamba_radix_cache_strategy"}
    assert given.mamba_radix_cache_strategy == ("auto" if name == "qwen3-8b" else "extra_buffer")


@needs_plain_cpu
@pytest.mark.parametrize("name", PUBLISHED)
def test_a_backend_of_another_machine_is_refused_by_name(
    name: str, resolve: Any, folders: Any
) -> None:
    argv = local(flags(PUBLISHED[name]), folders)
    asked = [f"{flag}: {argv[argv.index(flag) + 1]!r}" for flag in BACKENDS if flag in argv]
    with pytest.raises(ValueError, match=r"cannot run on a plain CPU") as refusal:
        resolve(argv)
    assert str(refusal.value) == f"{', '.join(asked)} cannot run on a plain CPU; 'torch_native' can"


@needs_plain_cpu
@pytest.mark.parametrize(
    "flag", ["--prefill-attention-backend", "--decode-attention-backend", BACKENDS[1]]
)
def test_no_other_backend_flag_slips_through(flag: str, resolve: Any, folders: Any) -> None:
    argv = on_this_machine(local(flags(LINE), folders))
    with pytest.raises(
        ValueError, match=f"^{flag}: 'fa4' cannot run on a plain CPU; 'torch_native' can$"
    ):
        resolve([*argv, flag, "fa4"])


@needs_plain_cpu
@pytest.mark.parametrize("name", PUBLISHED)
def test_with_the_backend_of_this_machine_it_resolves_to_our_worker(
    name: str, resolve: Any, folders: Any, capfd: Any
) -> None:
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    server_args = resolve([*on_this_machine(local(flags(PUBLISHED[name]), folders)), *WINDOW])
    assert resolved_fields(server_args) == ASKED
    worker = SpeculativeAlgorithm.DFLASH.create_worker(server_args)
    assert worker.func.__name__ == "_build_worker"
    assert "built-in worker" not in capfd.readouterr().err


class Stopped(Exception):
    """A server was about to be launched."""


@needs_plain_cpu
@pytest.mark.filterwarnings("ignore:'python -m sglang.launch_server' is still supported")
@pytest.mark.parametrize(
    "how", ["python -m sglang.launch_server", "sglang serve", "sglang serve, model first"]
)
def test_every_command_line_reaches_the_server(
    how: str, resolve: Any, folders: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sglang.cli.main
    import sglang.cli.serve
    import sglang.srt.entrypoints.http_server
    import sglang.srt.utils

    def stop(server_args: Any) -> None:
        raise Stopped(server_args)

    # What follows the resolution; and the clean-up, which would end every child of this process.
    monkeypatch.setattr(sglang.srt.entrypoints.http_server, "launch_server", stop)
    for module in (sglang.srt.utils, sglang.cli.serve):
        monkeypatch.setattr(module, "kill_process_tree", lambda *_args, **_kwargs: None)
    argv = [*on_this_machine(local(flags(LINE), folders)), *WINDOW]
    if how.endswith("first"):
        argv = argv[1:]
    serve = how.startswith("sglang serve")
    monkeypatch.setattr(
        sys, "argv", ["sglang", "serve", *argv] if serve else ["launch_server", *argv]
    )
    with pytest.raises(Stopped) as stopped:
        if serve:
            sglang.cli.main.main()
        else:
            runpy.run_module("sglang.launch_server", run_name="__main__")
    assert resolved_fields(stopped.value.args[0]) == ASKED


ENGINE = """
import json, sys
import sglang
from sglang.srt.entrypoints.engine import Engine

class Stopped(Exception):
    pass

def stop(self, server_args, **others):
    server_args.resolve_once()
    raise Stopped(server_args)

Engine._launch_subprocesses = stop
from tests.test_published_commands import resolved_fields
found = []
for kwargs in json.loads(sys.argv[1]):
    try:
        sglang.Engine(**kwargs)
    except Stopped as stopped:
        found.append(resolved_fields(stopped.args[0]))
print(json.dumps(found))
sys.stdout.flush()
import os; os._exit(0)
"""


@needs_plain_cpu
def test_engine_takes_the_published_flags_as_keywords(folders: Any) -> None:
    def literal(word: str) -> Any:
        try:
            return ast.literal_eval(word)
        except (ValueError, SyntaxError):
            return word

    def keywords(argv: list[str]) -> dict[str, Any]:
        pairs = zip(argv, [*argv[1:], "--"], strict=True)
        return {
            f[2:].replace("-", "_"): True if v.startswith("--") else literal(v)
            for f, v in pairs
            if f.startswith("--")
        }

    calls = [
        keywords([*on_this_machine(local(flags(command), folders)), *WINDOW])
        for command in PUBLISHED.values()
    ]
    assert {"mamba_scheduler_strategy", "speculative_dflash_draft_window_size"} <= set(calls[0])
    command = [sys.executable, "-W", "ignore", "-c", ENGINE, json.dumps(calls)]
    done = subprocess.run(command, cwd=LAUNCH.parent, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1]) == [ASKED] * len(PUBLISHED)


# -- the variables that the cards export


@needs_plain_cpu
def test_retired_variables_are_told_of_in_one_line(
    resolve: Any, folders: Any, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    argv = on_this_machine(local(flags(LINE), folders))
    resolve(argv)
    assert "SGLANG_ENABLE" not in capfd.readouterr().err
    for name in (
        "SGLANG_ENABLE_SPEC_V2",
        "SGLANG_ENABLE_DFLASH_SPEC_V2",
        "SGLANG_ENABLE_OVERLAP_PLAN_STREAM",
    ):
        monkeypatch.setenv(name, "1")
    resolve(argv)
    told = [line for line in capfd.readouterr().err.splitlines() if "SGLANG_ENABLE" in line]
    assert (
        len(told) == 1
        and "SGLANG_ENABLE_SPEC_V2=1, SGLANG_ENABLE_DFLASH_SPEC_V2=1: SGLang no longer reads this"
        in told[0]
    )
    assert "PLAN_STREAM" not in told[0]


def test_what_is_told_of_the_variables_is_true_of_this_sglang() -> None:
    """A new SGLang may take one up again, or drop another."""
    from sglang.srt.environ import envs

    from sglang_dflash.serving.arguments import RETIRED_VARIABLES

    assert not any(hasattr(envs, name) for name in RETIRED_VARIABLES)
    assert hasattr(envs, "SGLANG_ENABLE_OVERLAP_PLAN_STREAM") and hasattr(
        envs, "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"
    )


def test_the_plan_stream_is_still_a_stream_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.speculative.dflash_info_v2 import _get_overlap_plan_stream

    assert _get_overlap_plan_stream("cpu")[0] is None
    monkeypatch.setenv("SGLANG_ENABLE_OVERLAP_PLAN_STREAM", "1")
    assert _get_overlap_plan_stream("cpu")[0] is not None


@needs_plain_cpu
def test_a_longer_context_still_needs_its_variable(
    resolve: Any, folders: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = [
        *on_this_machine(local(flags(PUBLISHED["qwen3.5-35b-a3b"]), folders)),
        "--context-length",
        "10000",
    ]
    for name in ("SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN", "SGLANG_IS_IN_CI", "GITHUB_ACTIONS"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match="SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1"):
        resolve(argv)
    monkeypatch.setenv("SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN", "1")
    resolve(argv)


# -- launch/serve_*.sh


def run_script(
    name: str, *arguments: str, tmp_path: Path, **environment: str
) -> tuple[list[str], dict[str, str]]:
    """What the script hands to Python, and the variables that it exports."""
    show = tmp_path / "python"
    show.write_text('#!/usr/bin/env bash\nenv > "$(dirname "$0")/env"\nprintf "%s\\n" "$@"\n')
    show.chmod(0o755)
    before = {**os.environ, "PYTHON": str(show), **environment}
    script = str(LAUNCH / f"serve_{name}.sh")
    shown = subprocess.run(
        ["bash", script, *arguments], env=before, capture_output=True, text=True, check=True
    ).stdout
    after = dict(
        line.split("=", 1)
        for line in (tmp_path / "env").read_text().splitlines()
        if line.startswith("SGLANG_")
    )
    return shown.splitlines(), {k: v for k, v in after.items() if before.get(k) != v}


def test_there_is_a_script_for_every_command() -> None:
    assert {path.stem for path in LAUNCH.glob("serve_*.sh")} == {
        f"serve_{name}" for name in SCRIPTS
    }


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_is_its_published_command(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("TARGET", "DRAFT", "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"):
        monkeypatch.delenv(variable, raising=False)
    subprocess.run(["bash", "-n", str(LAUNCH / f"serve_{name}.sh")], check=True)
    words, exported = run_script(name, tmp_path=tmp_path)
    assert words == ["-m", "sglang.launch_server", *flags(SCRIPTS[name])]
    assert exported == (
        {"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"} if name == "qwen3.5-35b-a3b" else {}
    )


@needs_plain_cpu
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_takes_models_and_arguments_and_resolves(
    name: str, resolve: Any, folders: Any, tmp_path: Path
) -> None:
    at_home = local(flags(SCRIPTS[name]), folders)
    target, draft = (at_home[at_home.index(flag) + 1] for flag in MODELS)
    words, _ = run_script(
        name,
        *WINDOW,
        "--served-model-name",
        "two words",
        tmp_path=tmp_path,
        TARGET=target,
        DRAFT=draft,
    )
    assert words[2:] == [*at_home, *WINDOW, "--served-model-name", "two words"]
    fields = resolved_fields(resolve(on_this_machine(words[2:])))
    assert fields == {**ASKED, "mamba_radix_cache_strategy": fields["mamba_radix_cache_strategy"]}
