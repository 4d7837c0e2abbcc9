"""SGLang's own router before servers of the tests."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import requests

from sglang_dflash.tools.bench.server import free_port

BOUND = 120


def post(url: str, prompt: str | list[int], **sampling: Any) -> requests.Response:
    key = "text" if isinstance(prompt, str) else "input_ids"
    body = {key: prompt, "sampling_params": sampling}
    return requests.post(f"{url}/generate", json=body, timeout=BOUND)


@contextmanager
def router(*arguments: str) -> Iterator[str]:
    """The router's address, once an answer comes through it.

    Args:
        arguments: of its command line: its servers, among others.
    """
    port = free_port()
    command = [
        sys.executable, "-m", "sglang_router.launch_router", "--host", "127.0.0.1",
        "--port", str(port), "--prometheus-port", str(free_port()), *arguments,
    ]  # fmt: skip
    log = Path(tempfile.mkstemp(prefix="sglang-router-", suffix=".log")[1])
    process = subprocess.Popen(command, stdout=log.open("w"), stderr=subprocess.STDOUT)
    url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + BOUND
    try:
        while time.monotonic() < deadline and process.poll() is None:
            with suppress(requests.RequestException):
                if post(url, "x = ", temperature=0, max_new_tokens=2).ok:
                    break
            time.sleep(0.5)
        else:
            raise AssertionError(log.read_text()[-2000:])
        yield url
    finally:
        process.terminate()
        process.wait(30)
