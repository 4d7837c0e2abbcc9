"""Our commands as the README prints them, with no flag and no environment variable added."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from sglang_dflash.drafting.packed import has_amx, packs_float16
from sglang_dflash.serving.start.flags import ALIASES, TYPED
from sglang_dflash.tools.bench.server import Server
from sglang_dflash.tools.demo_pairs.pairs import demo_pair
from tests.commands import Printed, commands, snippets
from tests.engine import workload
from tests.engine.client import counts
from tests.engine.servers import DFLASH, DFLASH_FLAGS, PAIR, ServerConfig
from tests.engine.session import ServerSession

AS_PRINTED = ServerConfig(name="as-printed").having(model_path=PAIR.target, **DFLASH_FLAGS)


def used_mib(pid: int) -> float:
    """Memory of a process and its children; what they share is counted once (PSS)."""
    root = psutil.Process(pid)
    processes = [root, *root.children(recursive=True)]
    return sum(process.memory_full_info().pss for process in processes) / 2**20


# Before the pools were sized by the model, 11.4 GiB (dense) and 17.0 GiB (hybrid) of 23 GiB.
@pytest.mark.parametrize("kind", ["dense", pytest.param("hybrid", marks=pytest.mark.long)])
def test_the_readme_command_serves_in_16_bits_and_little_memory(
    kind: str, servers: ServerSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "TRITON_INTERPRET" not in os.environ
    servers.stop()
    log, pair = tmp_path / "log", demo_pair(kind)
    config = AS_PRINTED.having(model_path=pair.target, speculative_draft_model_path=pair.draft)
    # A machine without a C++ compiler, and without what one has compiled before.
    bare = {"CXX": "/no/compiler", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "compiled")}
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    with Server(replace(config, env=bare), log=log, timeout_s=600) as server:
        # SGLang would compile functions for the first penalty, and here answer with HTTP 500.
        server.generate("import os", repetition_penalty=1.3, max_new_tokens=4)
        # float16 weights, where those are faster, have float32 rows.
        dtype = "float32" if packs_float16() and not has_amx() else "bfloat16"
        assert server.dflash()["draft_kv_dtype"] == dtype
        answers = [
            server.generate(text, temperature=0, max_new_tokens=40, ignore_eos=True)
            for text in pair.prompts[:6]
        ]
        assert workload.acceptance_length(answers) > 2
        assert server.process is not None
        used = used_mib(server.process.pid)
        print(f"{kind}: {used:.0f} MiB")
        assert used < 3200
    assert server.process.returncode != -signal.SIGKILL
    (line,) = [line for line in log.read_text().splitlines() if "the pools get" in line]
    assert "the pools get 256 MiB" in line and "--max-total-tokens sets another size" in line


@pytest.mark.server(DFLASH)
def test_the_readmes_clients_get_an_answer(server: Any) -> None:
    """`curl` and the Python of the README, at this server's address instead of the default one."""
    here = ("http://127.0.0.1:30000", server.url)

    def answer(curl: Printed) -> str:
        words = [word.replace(*here) for word in curl.words]
        done = subprocess.run([*words, "-sf"], check=True, capture_output=True, text=True)
        return json.loads(done.stdout)["choices"][0]["text"]

    of_readme, others = [], []
    for curl in commands("curl"):
        (of_readme if curl.page == "README.md" else others).append(curl)
    assert all(map(answer, others))
    before = counts(server)
    assert of_readme and all(map(answer, of_readme))
    (snippet,) = snippets()
    python = [sys.executable, "-c", snippet.replace(*here)]
    assert subprocess.run(python, check=True, capture_output=True, text=True).stdout.strip()
    # What a newcomer sees first is text that the pair knows.
    length = (counts(server) - before).acceptance_length
    assert length is not None and length > 4


@pytest.mark.parametrize(("plugins", "shown"), [("", True), ("none", False)])
def test_the_help_of_sglang_serve_has_our_flags(plugins: str, shown: bool) -> None:
    command = [Path(sys.executable).with_name("sglang"), "serve", "--help"]
    env = {**os.environ, "SGLANG_PLUGINS": plugins}
    told = subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout
    assert "--speculative-draft-model-path" in told
    ours = {flag for flag in TYPED.values() if flag.startswith("--speculative-dflash-")}
    ours |= {f"--{alias.replace('_', '-')}" for alias in ALIASES}
    assert {flag for flag in ours if flag in told} == (ours if shown else set())
