"""An environment with vLLM that is none: a Python whose `vllm` is this file.

What a server of it prints, takes and answers is what vLLM 0.32.0 does, as far as `bench` sees it.
It answers with ten tokens, of which the first comes with the prompt.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

# What the fake reads of its environment: the word that it answers with, and the reason for which it
# refuses a draft.
WORD, REFUSAL = "FAKE_VLLM_WORD", "FAKE_VLLM_REFUSAL"
TOKENS, DRAFTS = 10, 3
REFUSED = """\
(APIServer pid=1) INFO 11-25 14:35:44 [api_utils.py:347] version 0.32.0
(Worker pid=3) ERROR 11-25 14:36:10 [multiproc_executor.py:953] Traceback (most recent call last):
(Worker pid=3) ERROR 11-25 14:36:10 [multiproc_executor.py:953]     raise ValueError(
(Worker pid=3) ERROR 11-25 14:36:10 [multiproc_executor.py:953] ValueError: {reason}
(EngineCore pid=2) ERROR 11-25 14:36:12 [core.py:1510] EngineCore failed to start.
(EngineCore pid=2) ERROR 11-25 14:36:12 [core.py:1510] Exception: WorkerProc initialization failed
RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {{}}
"""


def environment(folder: Path, distributions: dict[str, str] | None = None, **variables: str) -> str:
    """The Python of an environment that is made in that folder.

    Args:
        distributions: name -> version.
        variables: of the environment.
    """
    package = folder / "vllm/entrypoints/openai"
    package.mkdir(parents=True)
    shutil.copy(__file__, package / "api_server.py")
    for name, version in (distributions or {"vllm": "9.8.7+cpu"}).items():
        about = folder / f"{name.replace('-', '_')}-{version}.dist-info"
        about.mkdir()
        about.joinpath("METADATA").write_text(
            f"Metadata-Version: 2.4\nName: {name}\nVersion: {version}\n"
        )
    python = folder / "python"
    lines = [f"export {name}='{value}'" for name, value in variables.items()]
    # Of the bench's Python nothing but the standard library: what it has installed is not found.
    run = f'exec {sys.executable} -S "$@"'
    python.write_text("\n".join(["#!/bin/sh", f"export PYTHONPATH={folder}", *lines, run, ""]))
    python.chmod(0o755)
    return str(python)


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, asked: argparse.Namespace) -> None:
        super().__init__((asked.host, asked.port), Handler)
        self.asked, self.answered, self.flushed = asked, 0, 0
        self.speculative = asked.speculative_config and json.loads(asked.speculative_config)

    def pages(self) -> dict[str, Any]:
        speculative = self.speculative
        threads = os.environ["OMP_NUM_THREADS"]
        model = {"model": self.asked.model, "dtype": f"torch.{self.asked.dtype}"}
        info = {
            "vllm_config": {"model_config": model, "speculative_config": speculative},
            "system_env": {
                "torch_version": "2.13.0+cpu",
                "nvidia_gpu_models": None,
                "cpu_info": f"CPU(s):       {threads}\nModel name:    an abacus",
            },
        }
        of = {"id": self.asked.model, "object": "model", "owned_by": "vllm"}
        pages = {
            "/health": "",
            "/version": {"version": "9.8.7"},
            "/v1/models": {"object": "list", "data": [of]},
            "/metrics": self.metrics() if speculative else "vllm:num_requests_running 0.0\n",
        }
        development = {"/server_info?config_format=json": info}
        return pages | (development if os.environ.get("VLLM_SERVER_DEV_MODE") == "1" else {})

    def metrics(self) -> str:
        labels = f'engine="0",model_name="{self.asked.model}"'
        steps, accepted = DRAFTS * self.answered, (TOKENS - 1 - DRAFTS) * self.answered
        return f"""\
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{{{labels}}} {float(steps)}
vllm:spec_decode_num_drafts_created{{{labels}}} 1.7956151014563284e+09
vllm:spec_decode_num_draft_tokens_total{{{labels}}} {7.0 * steps}
vllm:spec_decode_num_accepted_tokens_total{{{labels}}} {float(accepted)}
vllm:spec_decode_num_accepted_tokens_per_pos_total{{{labels},position="0"}} {float(steps)}
"""


class Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, *_: Any) -> None:
        pass

    def _send(self, status: int, body: Any) -> None:
        data = (body if isinstance(body, str) else json.dumps(body)).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        pages = self.server.pages()
        self._send(200 if self.path in pages else 404, pages.get(self.path, "{}"))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"] or 0)) or "null")
        development = os.environ.get("VLLM_SERVER_DEV_MODE") == "1"
        if self.path == "/reset_prefix_cache" and development:
            self._send(200, {"success": True})
        elif self.path == "/v1/completions" and body["model"] == self.server.asked.model:
            self._complete(body)
        else:
            self._send(404, "{}")

    def _complete(self, body: dict[str, Any]) -> None:
        assert body["temperature"] == 0 and body["stream"] and body["ignore_eos"]
        count = min(TOKENS, body["max_tokens"])
        self.server.answered += 1
        self.send_response(200)
        self.end_headers()
        word = os.environ.get(WORD, "plain")
        # A step's tokens come at once.
        sizes = [1, *[(TOKENS - 1) // DRAFTS] * DRAFTS] if self.server.speculative else [1] * count
        sent = 0
        for size in sizes:
            new = min(size, count - sent)
            sent += new
            choice: dict[str, Any] = {"index": 0, "text": f"{word} " * new}
            if body.get("return_token_ids"):
                choice["token_ids"] = [sum(map(ord, f"{word} "))] * new
            self._event({"choices": [choice]})
        if body["stream_options"]["include_usage"]:
            self._event({"choices": [], "usage": {"completion_tokens": sent}})
        self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, chunk: dict[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())
        self.wfile.flush()


def main() -> None:
    # Flags of vLLM that `bench` knows; others end it, as they do there.
    parser = argparse.ArgumentParser()
    for flag in ("host", "model", "dtype", "generation-config", "speculative-config"):
        parser.add_argument(f"--{flag}")
    for flag in ("port", "max-model-len", "max-num-seqs", "kv-cache-memory-bytes"):
        parser.add_argument(f"--{flag}", type=int)
    parser.add_argument("--enforce-eager", action="store_true")
    asked = parser.parse_args()
    if asked.speculative_config and REFUSAL in os.environ:
        print(REFUSED.format(reason=os.environ[REFUSAL]))
        sys.exit(1)
    time.sleep(0.3)
    Server(asked).serve_forever(0.01)


if __name__ == "__main__":
    main()
