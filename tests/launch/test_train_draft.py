"""`python launch/train_draft.py`: from a folder to a draft that SGLang serves, cut once."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from launch import train_draft
from sglang_dflash.checkpoint.draft_config import DraftConfig
from sglang_dflash.tools.bench.server import Server, ServerConfig, dflash_flags
from tests import ROOT
from tests.launch.small_target import PROMPTS, write_prompts, write_target


def command(folder: Path) -> list[str]:
    prompts = write_prompts(folder / "prompts.jsonl")
    return [
        sys.executable, "launch/train_draft.py", "--target", str(folder / "target"),
        "--work", str(folder / "work"), "--out", str(folder / "draft"), "--prompts", str(prompts),
        "--held-out", f"again={prompts}", "--shards", "2", "--chats", "8", "--steps", "10",
        "--milestone", "0.5",
    ]  # fmt: skip


def cut_after_a_milestone(asked: list[str], folder: Path) -> dict[Path, bytes]:
    """Run it until a state is saved, and kill it; what it has written."""
    with subprocess.Popen(asked, cwd=ROOT) as process:
        while not (folder / "work/draft.curve.json").exists():
            assert process.poll() is None, "it ended, or failed, before the cut"
            time.sleep(0.2)
        process.send_signal(signal.SIGKILL)
    files = [*(folder / "work/text").glob("*"), *(folder / "work/states").glob("*.pt")]
    return {file: file.read_bytes() for file in files}


# Two minutes of one core: parts of it are tested in every run (test_recipe.py).
@pytest.mark.long
@pytest.mark.engine
def test_from_a_folder_to_a_served_draft(tmp_path: Path) -> None:
    write_target(tmp_path / "target")
    asked = command(tmp_path)
    written = cut_after_a_milestone(asked, tmp_path)
    assert len(written) == 4 and not (tmp_path / "draft").exists()
    done = subprocess.run(asked, cwd=ROOT, check=True, capture_output=True, text=True)
    # Text and states are not written again, and the steps go on.
    assert all(file.read_bytes() == before for file, before in written.items())
    assert "text 1/2" not in done.stdout and "states 0" not in done.stdout
    curve = json.loads((tmp_path / "draft/curve.json").read_text())
    assert len(curve) > 1 and curve[-1]["step"] == 10 and set(curve[-1]["held_out"]) == {
        "chat", "again",
    }  # fmt: skip
    card = (tmp_path / "draft/README.md").read_text()
    assert f"| 10 | CPU | {curve[-1]['seconds']:,} |" in card and "again (8)" in card
    assert DraftConfig.from_pretrained(tmp_path / "draft").block_size == 8
    served_as_plain_decoding(tmp_path)


def served_as_plain_decoding(folder: Path) -> None:
    """Greedy answers in float32 are Transformers'."""
    target = AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder / "target")
    flags = {
        "--model-path": str(folder / "target"), "--dtype": "float32", "--sleep-on-idle": True,
        "--max-total-tokens": 4096, **dflash_flags(str(folder / "draft")),
    }  # fmt: skip
    with Server(ServerConfig().with_flags(flags)) as server:
        for prompt in PROMPTS[:4]:
            ids = tokenizer(prompt)["input_ids"]
            answer = server.generate(ids, temperature=0, max_new_tokens=24, ignore_eos=True)
            wanted = target.generate(
                torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)), max_new_tokens=24,
                min_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=0,
            )  # fmt: skip
            assert answer["output_ids"] == wanted[0, len(ids) :].tolist()
            assert answer["meta_info"]["spec_verify_ct"] > 0


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (["--held-out", "a=nowhere.jsonl"], "--held-out: 'nowhere.jsonl'; there is no such file"),
        (["--held-out", "nowhere.jsonl"], "--held-out: 'nowhere.jsonl'; NAME=FILE is required"),
        (["--prompts", "nowhere.jsonl"], "--prompts: 'nowhere.jsonl'; there is no such file"),
        (["--device", "gpu"], "--device: 'gpu'; "),
        (["--device", "meta"], "--device: 'meta'; choose one of cpu, cuda"),
        (["--steps", "0"], "--steps: 0; a positive number"),
        # Its empty state in --work was that of "another target" for the right one.
        ([], "--target: 'nowhere'; a folder with a chat model"),
    ],
)
def test_mistakes_are_one_line(wrong: list[str], words: str, tmp_path: Path) -> None:
    asked = ["--target", "nowhere", "--work", str(tmp_path / "w"), "--out", "o", *wrong]
    with pytest.raises(SystemExit) as ended:
        train_draft.main(asked)
    assert str(ended.value.code).startswith(f"train_draft: {words}")
    assert not (tmp_path / "w").exists()
