"""`sglang-dflash generate` prints what the target generates without a draft."""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang_dflash.drafting.options import Options
from sglang_dflash.tools import cli, transformers_loop
from sglang_dflash.tools.demo_pairs.pairs import DemoPair, demo_pair
from sglang_dflash.tools.transformers_loop import chat_tokens

NEW_TOKENS = 40
PAIR = demo_pair("dense")


@pytest.fixture(autouse=True, scope="module")
def cached() -> Iterator[None]:
    """Each pair is loaded once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformers_loop, "load", functools.cache(transformers_loop.load))
        yield


def by_generate(pair: DemoPair, prompt: str | list[int]) -> tuple[Any, list[int]]:
    """The tokenizer, and the tokens of Transformers' own greedy generation (its own stop rules)."""
    loaded = transformers_loop.load(str(pair.target), str(pair.draft), Options(), None, None)
    ids = loaded.tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt
    with torch.inference_mode():
        out = loaded.target.generate(
            torch.tensor([ids]), max_new_tokens=NEW_TOKENS, do_sample=False
        )
    return loaded.tokenizer, out[0, len(ids) :].tolist()


def command(pair: DemoPair, *more: str) -> list[str]:
    names = ["--target", str(pair.target), "--draft", str(pair.draft)]
    return ["generate", *names, "--max-new-tokens", str(NEW_TOKENS), *more]


@pytest.mark.parametrize("kind", ["dense", "hybrid"])
def test_output_is_that_of_transformers_generate(
    kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pair = demo_pair(kind)
    for prompt in pair.prompts[:2]:
        tokenizer, expected = by_generate(pair, prompt)
        assert cli.main(command(pair, "--prompt", prompt)) == 0
        shown = capsys.readouterr()
        assert shown.out == tokenizer.decode(expected, skip_special_tokens=True) + "\n"
        last = shown.err.splitlines()[-1]
        assert f"{NEW_TOKENS} tokens in " in last and last.endswith("; ended at --max-new-tokens")
        assert cli.main(command(pair, "--prompt", prompt, "--json")) == 0
        done = json.loads(capsys.readouterr().out)
        assert done["tokens"] == expected and done["finish_reason"] == "length"
        assert done["acceptance_length"] > 2


def test_a_block_beyond_the_trained_size_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    assert cli.main(command(PAIR, "--prompt", "x", "--block-size", "9")) == 0
    (warning,) = [r.message for r in caplog.records if r.name.startswith("sglang_dflash")]
    assert "9 is more than the 8 of a block that the draft was trained with" in warning
    assert "steps take longer" in warning and "hardly ever" not in warning


def test_a_chat_goes_through_the_template_and_ends_where_generate_ends(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The generation config gets a token of the answer as a stop token."""
    target = shutil.copytree(PAIR.target, tmp_path / "target")
    tokenizer, _ = by_generate(PAIR, "a")
    chat = chat_tokens(tokenizer, [{"role": "user", "content": PAIR.prompts[0]}])
    _, whole = by_generate(PAIR, chat)
    file = target / "generation_config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, "eos_token_id": [1022, whole[30]]}))
    stopping = replace(PAIR, target=target)
    _, expected = by_generate(stopping, chat)
    assert 0 < len(expected) <= 31
    assert cli.main(command(stopping, "--prompt", PAIR.prompts[0], "--chat", "--json")) == 0
    done = json.loads(capsys.readouterr().out)
    assert done["tokens"] == expected and done["finish_reason"] == "stop"
    assert done["prompt_tokens"] == len(chat)


def test_a_seed_makes_samples_reproducible(capsys: pytest.CaptureFixture[str]) -> None:
    few = ["--prompt", "def ", "--max-new-tokens", "16", "--temperature", "1.5", "--json"]

    def sampled(*more: str) -> dict[str, Any]:
        assert cli.main(command(PAIR, *few, *more)) == 0
        return json.loads(capsys.readouterr().out)

    once = sampled("--seed", "7")
    assert sampled("--seed", "7")["tokens"] == once["tokens"]
    assert sampled("--seed", "8")["tokens"] != once["tokens"]
    free = sampled()
    assert sampled("--seed", str(free["seed"]))["tokens"] == free["tokens"] != once["tokens"]
    # Only one token is kept: greedy at any temperature.
    greedy = sampled("--temperature", "0")["tokens"]
    assert sampled("--top-k", "1")["tokens"] == sampled("--top-p", "1e-9")["tokens"] == greedy


# Flags -> the flag that the error names.
BAD = {
    "--prompt=": "--prompt",
    "--prompt=a --max-new-tokens=0": "--max-new-tokens",
    "--prompt=a --temperature=-1": "--temperature",
    "--prompt=a --temperature=nan": "--temperature",
    "--prompt=a --top-p=0": "--top-p",
    "--prompt=a --top-k=-2": "--top-k",
    "--prompt=a --seed=-1": "--seed",
    "--prompt=a --dtype=int8": "--dtype",
    "--prompt=a --block-size=1": "--block-size",
    "--prompt=a --window=3": "--window",
    "--prompt=a --device=abacus": "--device",
    "--prompt=a --target=NOWHERE": "--target",
    "--prompt=a --draft=NOWHERE": "--draft",
}


@pytest.mark.parametrize("flags", BAD)
def test_bad_input_is_refused_by_name(
    flags: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = flags.replace("NOWHERE", str(tmp_path / "nowhere")).split(" ")
    assert cli.main(command(PAIR, *more)) == 1
    shown = capsys.readouterr()
    assert not shown.out and shown.err.splitlines()[-1].startswith(f"sglang-dflash: {BAD[flags]}:")


def test_half_a_pair_and_an_unfit_pair_are_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["generate", "--prompt", "a", "--target", str(PAIR.target)]) == 1
    assert "give --target and --draft, or neither" in capsys.readouterr().err
    mixed = replace(PAIR, draft=demo_pair("hybrid").draft)
    assert cli.main(command(mixed, "--prompt", "a")) == 1
    assert "num_target_layers" in capsys.readouterr().err


@pytest.mark.engine
@pytest.mark.parametrize("given", [None, "ACTIVE"])
def test_waiting_threads_sleep_unless_the_user_says_otherwise(given: str | None) -> None:
    code = (
        "import os\nfrom sglang_dflash.tools import cli\n"
        "assert cli.main(['generate', '--prompt', 'a', '--device', 'abacus']) == 1\n"
        "print(os.environ['OMP_WAIT_POLICY'])"
    )
    env = {k: v for k, v in os.environ.items() if k != "OMP_WAIT_POLICY"}
    if given is not None:
        env["OMP_WAIT_POLICY"] = given
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env=env, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.split() == [given or "PASSIVE"]
