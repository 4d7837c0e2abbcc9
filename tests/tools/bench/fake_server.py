"""Servers that answer at once, as a test prescribes: SGLang's own API, or OpenAI's like vLLM.

SGLang's streams are chunked, as real servers' are; the others are not, as behind a simple proxy.
"""

from __future__ import annotations

import json
import tempfile
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

from sglang_dflash.tools.bench.server import ServerConfig

COMPLETIONS = ("/v1/completions", "/v1/chat/completions")

# Another one than the client's.
MACHINE = {"processor": "an abacus", "cores": 3, "accelerator": None, "torch": "7.6.5"}

# As SGLang logs it.
COMPILED = (
    "[2026-11-27 21:55:37] Triton kernel '_fwd_kernel' took 1.50 s to compile after serving "
    "started. Serving-time compilation can stall the engine; pre-compile it during engine init.\n"
)

# The pieces of the answer to a prompt.
Answer = Callable[[Any], list[str]]


def echo(prompt: Any) -> list[str]:
    return [f"{word} " for word in str(prompt).split()[:4]] + ["end"]


class FakeServer(ThreadingHTTPServer):
    """A context manager. `log` gets the name and request of every completion.

    As SGLang a piece is a token, and it counts a verify step for every three if it `speculates`, of
    which so many per answer are `undrafted`. With a `dtype` it tells of its machine. `delay_s`
    passes before the first piece, and `piece_s` between pieces.
    """

    daemon_threads = True
    # What an SGLang server tells of its memory.
    kv_tokens: int | None = None
    running_requests = 16
    # The log-probabilities of the two likeliest tokens anywhere differ by so much; None if it gives
    # none. A prompt has a token for each character.
    gap: float | None = None
    # Without one, SGLang sends no text.
    has_tokenizer = True

    def __init__(
        self,
        name: str,
        answer: Answer,
        log: list[Any],
        *,
        sglang: bool = False,
        incremental: bool = True,
        delay_s: float = 0.0,
        piece_s: float = 0.0,
        speculates: bool = True,
        undrafted: int = 0,
        dtype: str | None = "float32",
        deterministic: bool = False,
    ) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.deterministic = deterministic
        self.dtype, self.accelerator = dtype, None
        self.name, self.answer, self.requests = name, answer, log
        self.sglang, self.incremental, self.undrafted = sglang, incremental, undrafted
        self.delay_s, self.piece_s, self.speculates, self.answered = delay_s, piece_s, speculates, 0

    def __enter__(self) -> FakeServer:
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.shutdown()
        self.server_close()


class Started(FakeServer):
    """Stand-in for `sglang_dflash.tools.bench.server.Server`.

    It answers with ten words, a server with a draft with others, three per verify step. `beside`:
    servers that ran when it started. It logs the compilation of a kernel with each of the answers
    `compiling`, counted from 0.
    """

    made: ClassVar[list[Started]] = []
    compiling: ClassVar[tuple[int, ...]] = ()

    def __init__(self, config: ServerConfig, timeout_s: float) -> None:
        del timeout_s
        self.config, self.asked = config, list[Any]()
        drafts = "--speculative-algorithm" in config.flags
        super().__init__(
            "",
            lambda _: self.words(["drafted " if drafts else "plain "] * 10),
            self.asked,
            sglang=True,
            speculates=drafts,
            dtype=None,
        )
        self.is_up = False
        self.log = Path(tempfile.mkstemp(suffix=".log")[1])
        self.made.append(self)

    def words(self, answer: list[str]) -> list[str]:
        if self.answered in self.compiling:
            with self.log.open("a") as log:
                log.write(COMPILED)
        return answer

    def start(self) -> None:
        self.beside = sum(one.is_up for one in self.made)
        self.is_up = True
        self.__enter__()

    def wait(self) -> None:
        pass

    def stop(self) -> None:
        self.is_up = False
        self.__exit__()


class Handler(BaseHTTPRequestHandler):
    server: FakeServer

    def log_message(self, *_: Any) -> None:
        pass

    def _send(self, status: int, body: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def do_GET(self) -> None:
        undrafted = self.server.undrafted * self.server.answered
        ours = {"undrafted_steps": undrafted, "undrafted_tokens": undrafted}
        state: dict[str, Any] = {"dflash": ours} if undrafted else {}
        state["memory_usage"] = {"token_capacity": self.server.kv_tokens}
        state["effective_max_running_requests_per_dp"] = self.server.running_requests
        if self.server.dtype is not None:
            of = {"dtype": self.server.dtype, "accelerator": self.server.accelerator}
            state["machine"] = {**MACHINE, **of}
        states = {"internal_states": [state], "version": "9.8.7", "model_path": "/some/where/me/m"}
        states["enable_deterministic_inference"] = self.server.deterministic
        known = {
            "/server_info": json.dumps(states) if self.server.sglang else None,
            "/v1/models": json.dumps({"data": [{"id": "fake"}]}),
        }
        found = known.get(self.path)
        self._send(404 if found is None else 200, found or "no such page")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"] or 0)) or "null")
        path = self.path.split("?")[0]
        if path == "/flush_cache" and self.server.sglang:
            self._send(200, "")
        elif path == "/generate" and body.get("return_logprob"):
            self._likely(body)
        elif path == "/generate" if self.server.sglang else path in COMPLETIONS:
            self._complete(body)
        else:
            self._send(404, "no such page")

    def _likely(self, body: dict[str, Any]) -> None:
        if self.server.gap is None:
            self._send(400, "no log-probabilities")
            return
        self.server.requests.append(
            (self.server.name, body.get("text", body.get("input_ids")), body)
        )
        meta: dict[str, Any] = {}
        if body.get("logprob_start_len") == 0:
            meta["input_token_logprobs"] = [[None, ord(c), None] for c in body["text"]]
        if body.get("top_logprobs_num") == 2:
            meta["output_top_logprobs"] = [[[-0.5, 7, None], [-0.5 - self.server.gap, 8, None]]]
        self._send(200, json.dumps({"meta_info": meta}))

    def _complete(self, body: dict[str, Any]) -> None:
        chat = "messages" in body
        prompt = body.get("prompt", body.get("text", body.get("input_ids")))
        prompt = body["messages"][-1]["content"] if chat else prompt
        pieces = self.server.answer(prompt)
        self.server.requests.append((self.server.name, prompt, body))
        self.server.answered += 1
        self.protocol_version = "HTTP/1.1" if self.server.sglang else "HTTP/1.0"
        self.close_connection = True
        self.send_response(200)
        if self.server.sglang:
            self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        time.sleep(self.server.delay_s)
        for i, piece in enumerate(pieces):
            time.sleep(self.server.piece_s if i else 0)
            self._event(
                self._sglang_chunk(pieces, i)
                if self.server.sglang
                else {"choices": [{"delta": {"content": piece}} if chat else {"text": piece}]}
            )
        if not self.server.sglang:
            self._event({"choices": [], "usage": {"completion_tokens": len(pieces)}})
        self._write(b"data: [DONE]\n\n")
        if self.server.sglang:
            self._write(b"")

    def _sglang_chunk(self, pieces: list[str], i: int) -> dict[str, Any]:
        sent = pieces[i : i + 1] if self.server.incremental else pieces[: i + 1]
        ids = [sum(map(ord, piece)) for piece in sent]
        meta: dict[str, Any] = {"completion_tokens": i + 1}
        steps = (i + 2) // 3
        if self.server.speculates:
            meta["spec_verify_ct"] = steps
        text = {"text": "".join(sent)} if self.server.has_tokenizer else {}
        return {**text, "output_ids": ids, "meta_info": meta}

    def _event(self, chunk: dict[str, Any]) -> None:
        self._write(f"data: {json.dumps(chunk)}\n\n".encode())

    def _write(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data) if self.server.sglang else data)
        self.wfile.flush()
