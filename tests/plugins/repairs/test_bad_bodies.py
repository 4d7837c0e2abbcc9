"""Bodies that SGLang's code cannot read are the client's mistake: HTTP 400."""

from __future__ import annotations

import asyncio
import functools
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi.dependencies import utils
from fastapi.testclient import TestClient
from sglang.srt.entrypoints import http_server
from sglang.srt.function_call.function_call_parser import FunctionCallParser
from sglang.srt.multimodal.processors.executor import MultimodalProcessorExecutor

from sglang_dflash.plugins.repairs import bad_bodies
from tests.patches.originals import original

CHAT = {"messages": [{"role": "user", "content": "x"}]}
BODIES: tuple[tuple[str, Any], ...] = (
    ("/v1/chat/completions", {**CHAT, "response_format": "json"}),
    ("/v1/chat/completions", {**CHAT, "response_format": 1}),
    ("/invocations", {**CHAT, "response_format": ["x"]}),
    ("/invocations", [1]),
    ("/parse_function_call", {"text": "x", "tools": []}),
    ("/parse_function_call", {"text": "x", "tool_call_parser": "none-such"}),
)


@pytest.fixture
def send(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sends a body to SGLang's HTTP server, without the servers behind it: its status."""
    app, state = http_server.app, SimpleNamespace(chat_encoding_spec=None, encoding_adapter=None)
    monkeypatch.setattr(app.state, "openai_serving_chat", state, raising=False)
    manager = SimpleNamespace(tokenizer_manager=SimpleNamespace(tokenizer=None))
    monkeypatch.setattr(http_server, "_global_state", manager)
    client = TestClient(app, raise_server_exceptions=False)
    return lambda path, body: client.post(path, json=body)


@pytest.mark.parametrize(("path", "body"), BODIES, ids=str)
def test_a_body_is_a_500_without_the_row(
    path: str, body: Any, send: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = original("fastapi.dependencies.utils.request_body_to_args")
    make = original("sglang.srt.function_call.function_call_parser.FunctionCallParser.__init__")
    monkeypatch.setattr(utils, "request_body_to_args", read)
    monkeypatch.setattr(FunctionCallParser, "__init__", make)
    before = send(path, body).status_code
    monkeypatch.setattr(
        utils, "request_body_to_args", functools.partial(bad_bodies.read_body, read)
    )
    monkeypatch.setattr(
        FunctionCallParser,
        "__init__",
        lambda *args, **named: bad_bodies.make_tool_parser(make, *args, **named),
    )
    answer = send(path, body)
    assert (before, answer.status_code) == (500, 400), answer.text


def test_what_is_read_stays() -> None:
    async def both(values: Any) -> tuple[Any, Any]:
        return values, []

    assert asyncio.run(bad_bodies.read_body(both, {"a": 1})) == ({"a": 1}, [])
    assert bad_bodies.convert_request(lambda value: value, 3) == 3


def test_a_conversion_that_fails_on_a_type_is_a_bad_value() -> None:
    with pytest.raises(ValueError, match=r"cannot read \(TypeError: int"):
        bad_bodies.convert_request(int, None)


def test_a_wait_for_images_never_ends_without_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor takes an image for each place in the prompt."""
    run = original("sglang.srt.multimodal.processors.executor.MultimodalProcessorExecutor._run")

    def ask() -> Any:
        executor = MultimodalProcessorExecutor(object, 1)
        images = iter(())
        return asyncio.wait_for(executor.run(lambda processor: next(images)), 0.5)

    monkeypatch.setattr(MultimodalProcessorExecutor, "_run", run)
    with pytest.raises(TimeoutError):
        asyncio.run(ask())
    monkeypatch.setattr(
        MultimodalProcessorExecutor,
        "_run",
        lambda *args, **named: bad_bodies.process_media(run, *args, **named),
    )
    with pytest.raises(ValueError, match="more places for images"):
        asyncio.run(ask())
