"""The flags of the published benchmark command."""

from __future__ import annotations

import shlex
import subprocess
import sys

import pytest

from sglang_dflash.benchmark import arguments
from sglang_dflash.benchmark.__main__ import main
from sglang_dflash.facts.errors import ConfigError

# As the model cards print them, without the module.
SGLANG = (
    "--backend sglang --base-url http://127.0.0.1:30000 --model Qwen/Qwen3.5-35B-A3B "
    "--dataset gsm8k --num-prompts 128 --concurrency 1 --enable-thinking"
)
TRANSFORMERS = (
    "--backend transformers --model Qwen/Qwen3-8B --draft-model z-lab/Qwen3-8B-DFlash-b16 "
    "--dataset gsm8k --max-samples 128"
)
DATASETS = ("gsm8k", "math500", "humaneval", "mbpp", "mt-bench", "alpaca")


def parse(command: str) -> arguments.Settings:
    return arguments.parse(shlex.split(command))


def test_the_published_commands_parse_as_printed() -> None:
    of_server, of_pair = parse(SGLANG), parse(TRANSFORMERS)
    assert (of_server.num_prompts, of_server.concurrency) == (128, 1)
    assert of_server.enable_thinking and not of_pair.enable_thinking
    assert (of_pair.draft_model, of_pair.max_samples) == ("z-lab/Qwen3-8B-DFlash-b16", 128)
    assert not arguments.without_effect(of_server) and not arguments.without_effect(of_pair)
    assert (of_pair.max_new_tokens, of_pair.temperature) == (2048, 0.0)


@pytest.mark.parametrize("backend", ["sglang", "vllm", "transformers"])
@pytest.mark.parametrize("dataset", DATASETS)
def test_the_published_general_form_parses(backend: str, dataset: str) -> None:
    draft = " --draft-model D" if backend == "transformers" else ""
    settings = parse(
        f"--backend {backend} --model M --dataset {dataset} --num-prompts 128 --concurrency 8 "
        f"--enable-thinking{draft}"
    )
    assert (settings.dataset, settings.num_prompts) == (dataset, 128)
    ignored = ["--concurrency has no effect with --backend transformers"]
    assert arguments.without_effect(settings) == (ignored if draft else [])


def test_the_other_flags_of_the_original_parse() -> None:
    settings = parse(
        f"{TRANSFORMERS} --block-size 8 --draft-sliding-window-size 512 --max-new-tokens 64 "
        "--temperature 0.5"
    )
    assert (settings.block_size, settings.draft_sliding_window_size) == (8, 512)
    served = parse(f"{SGLANG} --top-p 0.9 --top-k 1 --timeout-s 60")
    assert (served.top_p, served.top_k, served.timeout_s) == (0.9, 1, 60)
    theirs = parse("--backend vllm --model M --dataset-name alpaca --max-concurrency 4 --seed 3")
    assert (theirs.dataset, theirs.concurrency, theirs.seed) == ("alpaca", 4, 3)


def test_a_flag_without_effect_is_named() -> None:
    found = arguments.without_effect(
        parse(
            "--backend vllm --model Qwen/Qwen3-4B --dataset demo --block-size 8 --enable-thinking"
        )
    )
    assert [line.split(" has ")[0] for line in found[:2]] == ["--block-size", "--enable-thinking"]
    assert "not trained on thinking; expect short" in found[2]


@pytest.mark.parametrize(
    "command, message",
    [
        ("--backend sglang --model M --dataset gsm8l", "did you mean gsm8k?"),
        ("--backend sglang --model M", "--dataset and --dataset-file: one of the two"),
        ("--backend transformers --model M --dataset demo", "--draft-model: missing"),
        ("--backend sglang --model M --dataset demo --num-prompts 0", "--num-prompts: 0"),
        ("--backend sglang --model M --dataset demo --concurrency -1", "--concurrency: -1"),
        ("--backend sglang --model M --dataset demo --temperature nan", "--temperature: nan"),
        ("--backend sglang --model M --dataset demo --top-p 0", "--top-p: 0"),
        ("--backend sglang --model M --dataset demo --top-k 0", "--top-k: 0"),
        ("--backend sglang --model M --dataset demo --base-url x:1", "--base-url: 'x:1'"),
    ],
)
def test_bad_input_is_refused_by_name(
    command: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match=message.replace("?", r"\?")):
        parse(command)
    assert main(shlex.split(command)) == 1
    shown = capsys.readouterr()
    assert not shown.out and shown.err.startswith("sglang_dflash.benchmark: --")


def test_an_unknown_backend_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        parse("--backend mlx --model M --dataset demo")
    assert exit_.value.code == 2 and "--backend" in capsys.readouterr().err


def test_help_loads_without_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = sys.modules['requests'] = None;"
        "from sglang_dflash.benchmark.__main__ import main; main(['--help'])"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "--draft-model" in shown.stdout
