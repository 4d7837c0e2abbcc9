"""The examples of examples/, run as their first lines say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from sglang_dflash.tools.bench.server import Server
from sglang_dflash.tools.transformers_loop import chat_tokens
from tests import ROOT
from tests.engine import client
from tests.engine.servers import DFLASH, PAIR
from tests.engine.session import ServerSession

EXAMPLES = ROOT / "examples"
TOKENS = 24


def run(example: str, *more: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", EXAMPLES / example, *more],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.mark.server(DFLASH)
def test_openai_client(server: Server) -> None:
    """Text is continued; with --chat a message is answered: streamed as in one piece."""
    few = ("--base-url", f"{server.url}/v1", "--max-tokens", str(TOKENS))
    body = {"model": "any", "max_tokens": TOKENS, "temperature": 0}
    prompt, message = PAIR.prompts[0], {"role": "user", "content": "Hello"}
    continued = client.post(server, "v1/completions", {**body, "prompt": prompt}).json()
    chat = client.post(server, "v1/chat/completions", {**body, "messages": [message]}).json()
    text = prompt + continued["choices"][0]["text"]
    assert run("openai_client.py", *few) == f"{text}\n-- {TOKENS} tokens\n"
    answer, tokens = chat["choices"][0]["message"]["content"], chat["usage"]["completion_tokens"]
    shown = run("openai_client.py", *few, "--chat", "Hello")
    assert answer and shown == f"{answer}\n-- {tokens} tokens\n"


def test_offline_engine(servers: ServerSession, tmp_path: Path) -> None:
    """The answers of the memorized texts, in few verify steps. bfloat16, as it is printed."""
    command = (str(EXAMPLES / "offline_engine.py"), "--max-new-tokens", str(TOKENS))
    status, shown = servers.nursery.run(*command, log=tmp_path / "log", OMP_NUM_THREADS="1")
    assert status == 0, shown[-40:]
    for prompt in PAIR.prompts[:2]:
        assert prompt in "\n".join(shown)
    lines = [line.split() for line in shown if line.endswith("verify steps")]
    assert len(lines) == 2
    for _, tokens, _, _, steps, *_ in lines:
        assert int(tokens) == TOKENS and 0 < int(steps) < TOKENS / 2


def test_the_published_snippet_lets_waiting_threads_sleep(tmp_path: Path) -> None:
    """It ran at a hundredth of the speed of `sglang-dflash generate`."""
    told = "import os, sys\nprint(os.environ.get('OMP_WAIT_POLICY'))\nsys.exit()\n"
    (tmp_path / "transformers.py").write_text(told)
    env = {k: v for k, v in os.environ.items() if k != "OMP_WAIT_POLICY"}
    paths = os.pathsep.join([str(tmp_path), env.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, EXAMPLES / "transformers_generate.py"], env={**env, "PYTHONPATH": paths},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.stdout == "PASSIVE\n", done.stderr


def test_transformers_generate() -> None:
    few = ("--device", "cpu", "--dtype", "float32", "--max-new-tokens", "32")
    shown = run("transformers_generate.py", *few)
    tokenizer = AutoTokenizer.from_pretrained(PAIR.target)
    target = AutoModelForCausalLM.from_pretrained(PAIR.target, dtype=torch.float32).eval()
    ids = chat_tokens(tokenizer, [{"role": "user", "content": PAIR.prompts[0]}])
    out = target.generate(torch.tensor([ids]), max_new_tokens=32, do_sample=False)
    answer, rate = shown.removesuffix("\n").rsplit("\n", 1)
    assert answer == tokenizer.decode(out[0, len(ids) :])
    assert re.fullmatch(r"32 tokens, [\d.]+ tokens/s, prefill included", rate)
