"""The published benchmark: its flags, and fake servers, which count a verify step for three
tokens."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from sglang_dflash.common.command_line import given
from sglang_dflash.tools.bench import published
from sglang_dflash.tools.bench.datasets import Prompt
from sglang_dflash.tools.bench.published import main
from sglang_dflash.tools.bench.published_settings import PublishedSettings
from sglang_dflash.tools.demo_pairs.pairs import demo_pair
from tests.errors import refused
from tests.tools.bench.fake_server import FakeServer

TARGET = demo_pair("dense").target


# As the model cards print them, without the module.
SGLANG = (
    "--backend sglang --base-url http://127.0.0.1:30000 --model Qwen/Qwen3.5-35B-A3B "
    "--dataset gsm8k --num-prompts 128 --concurrency 1 --enable-thinking"
)
TRANSFORMERS = (
    "--backend transformers --model Qwen/Qwen3-8B --draft-model z-lab/Qwen3-8B-DFlash-b16 "
    "--dataset gsm8k --max-samples 128"
)


def parse(command: str) -> tuple[PublishedSettings, list[str]]:
    """The settings, and the flags of which a warning is given."""
    values = given(published.command_line().parse_args(shlex.split(command)), PublishedSettings)
    settings = published.settings_of(values)
    # No set of the hub is fetched; all of them are chats.
    prompts = [Prompt(("text",), chat=settings.dataset[0] not in ("demo", "stdlib"))]
    warnings = published.without_effect(settings, values, settings.dataset[0], prompts)
    return settings, [line.split()[0] for line in warnings]


def test_the_published_commands_parse_as_printed() -> None:
    (of_server, without), (of_pair, _) = parse(SGLANG), parse(TRANSFORMERS)
    assert not without and (of_server.num_prompts, of_server.levels) == (128, (1,))
    assert (of_server.thinking, of_pair.thinking) == ("on", "off")
    assert (of_pair.draft, of_pair.max_samples) == ("z-lab/Qwen3-8B-DFlash-b16", 128)
    assert (of_pair.max_new_tokens, of_pair.temperature) == (2048, 0.0)
    other = " --block-size 8 --draft-sliding-window-size 512 --max-new-tokens 64 --temperature 0.5"
    pair, _ = parse(TRANSFORMERS + other)
    assert (pair.verify_block, pair.window, pair.temperature) == (8, 512, 0.5)
    served, _ = parse(f"{SGLANG} --top-p 0.9 --top-k 1 --timeout-s 60 --concurrency 8")
    assert (served.top_p, served.top_k, served.timeout_s, served.levels) == (0.9, 1, 60, (8,))
    theirs, _ = parse("--backend vllm --model M --dataset-name alpaca --max-concurrency 4 --seed 3")
    assert (theirs.dataset, theirs.levels, theirs.seed) == (("alpaca",), (4,), 3)


@pytest.mark.parametrize("backend", ["sglang", "vllm", "transformers"])
def test_the_published_general_form_parses(backend: str) -> None:
    for dataset in ("gsm8k", "math500", "humaneval", "mbpp", "mt-bench", "alpaca"):
        settings, without = parse(
            f"--backend {backend} --model M --dataset {dataset} --num-prompts 128 --concurrency 8 "
            f"--enable-thinking{' --draft-model D' * (backend == 'transformers')}"
        )
        assert (settings.dataset, settings.num_prompts) == ((dataset,), 128)
        assert without == ["--concurrency"] * (backend == "transformers")


def test_a_flag_without_effect_is_named() -> None:
    asked = "--backend vllm --model Qwen/Qwen3-4B --dataset demo --block-size 8 --enable-thinking"
    assert parse(asked)[1] == ["--block-size", "--enable-thinking"]
    # The built-in chats go through the template.
    assert parse(asked.replace("demo", "chat"))[1] == ["--block-size"]


@pytest.mark.parametrize(
    "wrong, field",
    [
        ("--dataset demo --dataset gsm8k", "dataset"),
        ("", "dataset"),
        ("--dataset demo --num-prompts 0", "num_prompts"),
        ("--dataset demo --concurrency -1", "concurrency"),
        ("--dataset demo --concurrency 1,8", "concurrency"),
        ("--dataset demo --temperature nan", "temperature"),
        ("--dataset demo --top-p 0", "top_p"),
        ("--dataset demo --top-k 0", "top_k"),
        ("--dataset demo --backend transformers", "draft"),
    ],
)
def test_bad_input_is_refused_by_name(
    wrong: str, field: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = f"--backend sglang --model M {wrong}"
    with refused(field):
        parse(command)
    assert main(shlex.split(command)) == 1
    shown = capsys.readouterr()
    assert not shown.out and shown.err.startswith("sglang_dflash.benchmark: --")


def test_the_command_needs_a_known_backend_and_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("--backend mlx --model M", "--backend vllm", "--model M"):
        with pytest.raises(SystemExit) as exit_:
            main(shlex.split(command))
        assert exit_.value.code == 2 and "--backend" in capsys.readouterr().err


def test_help_loads_without_torch() -> None:
    code = (
        "import runpy, sys; sys.modules['torch'] = None; sys.argv[1:] = ['--help'];"
        "runpy.run_module('sglang_dflash.benchmark', run_name='__main__')"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "--draft-model" in shown.stdout


def eight(_: Any) -> list[str]:
    """The prefill's token, then steps of 3, 3 and 1."""
    return ["word "] * 8


def run(command: str) -> int:
    return main(shlex.split(command))


def test_an_sglang_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log: list[Any] = []
    with FakeServer("a", eight, log, sglang=True) as server:
        code = run(
            f"--backend sglang --base-url {server.url} --model {TARGET} --dataset demo "
            f"--num-prompts 40 --concurrency 4 --output-file {tmp_path / 'new/out.json'}"
        )
    shown = capsys.readouterr()
    assert code == 0
    # Four to warm up, then 40 of 30 that exist; all as token ids.
    assert len(log) == 44 and len({tuple(ids) for _, ids, _ in log}) == 30
    assert "demo has 30 prompts, which repeat" in shown.err
    lines = [line.split(":", 1) for line in shown.out.splitlines() if ":" in line]
    found = {name: value.split()[0] for name, value in lines}
    assert found["Backend"] == "sglang" and found["Dataset"] == "demo"
    assert (found["Num prompts"], found["Concurrency"]) == ("40", "4")
    assert (found["Output tokens"], found["Spec verify ct"]) == ("320", "120")
    # Kept from verify steps: 7 tokens in 3 steps; SGLang divides 8 by 3.
    assert (found["Accept length"], found["SGLang's own"]) == ("2.333", "2.667")
    result = json.loads((tmp_path / "new/out.json").read_text())
    assert result["output_tok_s"] == pytest.approx(320 / result["latency_s"])
    assert len(result["answers"]) == 40 and result["answers"][0]["tokens"] == 8
    assert result["ttft_ms"] <= result["ttft_ms_p99"]


def test_chats_go_through_the_template_with_thinking_as_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "chats.jsonl"
    file.write_text('{"turns": ["What is it?", "A second turn is not sent."]}\n')
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    for thinking in (True, False):
        log: list[Any] = []
        with FakeServer("a", eight, log, sglang=True) as server:
            # As a user types it: without http://, and with a slash behind it.
            code = run(
                f"--backend sglang --base-url {server.url[7:]}/ --model {TARGET} --num-prompts 1 "
                f"--dataset-file {file} {'--enable-thinking' * thinking} --max-new-tokens 20"
            )
        assert "--enable-thinking" not in capsys.readouterr().err
        sampling = log[-1][2]["sampling_params"]
        assert code == 0 and len(log) == 2
        assert (sampling["ignore_eos"], sampling["max_new_tokens"]) == (False, 20)
        assert log[-1][1] == tokenizer.apply_chat_template(
            [{"role": "user", "content": "What is it?"}],
            add_generation_prompt=True,
            enable_thinking=thinking,
            return_dict=False,
        )


def test_a_vllm_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, log = tmp_path / "mixed.jsonl", list[Any]()
    file.write_text('{"turns": ["What is it?"]}\n{"prompt": "Once upon"}\n')
    with FakeServer("a", eight, log) as server:
        code = run(
            f"--backend vllm --base-url {server.url} --model served-name --num-prompts 4 "
            f"--dataset-file {file} --enable-thinking --temperature 0.5 --top-p 0.9"
        )
    shown = capsys.readouterr()
    bodies = [body for _, _, body in log]
    assert code == 0 and {body["model"] for body in bodies} == {"served-name"}
    chats = [body for body in bodies if "messages" in body]
    assert len(chats) in (2, 3) and len(bodies) == 5
    assert all(body["chat_template_kwargs"] == {"enable_thinking": True} for body in chats)
    assert all((body["temperature"], body["top_p"]) == (0.5, 0.9) for body in bodies)
    assert "Throughput:" in shown.out and "Accept" not in shown.out
    assert "prefix cache could not be emptied" in shown.err


def test_a_server_without_a_draft_has_no_acceptance(capsys: pytest.CaptureFixture[str]) -> None:
    with FakeServer("a", eight, [], sglang=True, speculates=False) as server:
        code = run(
            f"--backend sglang --base-url {server.url} --model {TARGET} --dataset demo "
            "--num-prompts 2"
        )
    shown = capsys.readouterr().out
    assert code == 0 and "Throughput:" in shown and "Accept" not in shown


def test_what_cannot_be_measured_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with FakeServer("a", eight, []) as server:
        ask = f"--backend sglang --base-url {server.url} --dataset demo --num-prompts 1 "
        assert run(f"{ask} --model {TARGET}") == 1
        assert "no SGLang server, but one of the OpenAI API" in capsys.readouterr().err
    with FakeServer("a", eight, [], sglang=True) as server:
        ask = f"--backend sglang --base-url {server.url} --dataset demo --num-prompts 1 "
        assert run(f"{ask} --model ./nonesuch") == 1
        assert "--model: './nonesuch'; it has no tokenizer" in capsys.readouterr().err
    gone = f"--backend sglang --base-url http://127.0.0.1:9 --dataset demo --model {TARGET}"
    assert run(gone) == 1
    assert "http://127.0.0.1:9/server_info cannot be reached: " in capsys.readouterr().err
    # Before anything runs.
    assert run(f"{gone} --output-file {TARGET}") == 1
    assert f"--output-file: '{TARGET}'; it cannot be written" in capsys.readouterr().err
