"""HTTP 400 for requests that SGLang cannot serve, instead of HTTP 500 or the end of the server."""

from __future__ import annotations

from typing import Any

from fastapi import HTTPException
from sglang.srt.arg_groups.overrides import resolving_view

from sglang_dflash.common.log import Log

logger = Log(__name__)

# Values of --log-requests-level.
LOG_LEVELS = range(4)
# Errors of code that got a value of an unexpected type.
_OF_OTHER_TYPES = (AttributeError, IndexError, KeyError, TypeError)


async def read_body(original: Any, *args: Any, **named: Any) -> tuple[dict[str, Any], list[Any]]:
    """Around FastAPI's `request_body_to_args`, which runs the validators of SGLang's requests.

    Returns:
        Arguments and errors. FastAPI answers errors with HTTP 400.
    """
    try:
        values, errors = await original(*args, **named)
    except _OF_OTHER_TYPES as error:
        logger.warning("a request cannot be read", exc_info=True)
        return {}, [{"type": "value_error", "loc": ("body",), "msg": _unreadable(error)}]
    return values, errors


def convert_request(original: Any, *args: Any, **named: Any) -> Any:
    """Around the conversion of OpenAI's requests to SGLang's. Raises ValueError: HTTP 400."""
    try:
        return original(*args, **named)
    except _OF_OTHER_TYPES as error:
        # The cause may also be the chat template or the tokenizer.
        logger.warning("a request cannot be converted", exc_info=True)
        raise ValueError(_unreadable(error)) from error


def process_media(original: Any, *args: Any, **named: Any) -> Any:
    """Around a processor's work on images and videos, which runs in a thread.

    Raises:
        ValueError: the prompt has more places for images than images. The StopIteration of the
            processor cannot pass from a thread to asyncio: the request would wait forever.
    """
    try:
        return original(*args, **named)
    except StopIteration as error:
        raise ValueError("more places for images or videos in the prompt than images") from error


def make_tool_parser(original: Any, *args: Any, **named: Any) -> Any:
    """Around the constructor of `FunctionCallParser`, which raises for unknown names.

    Raises:
        HTTPException: status 400.
    """
    try:
        return original(*args, **named)
    except ValueError as error:
        raise HTTPException(400, str(error)) from error


def refuse_without_recorder(manager: Any) -> None:
    """Before the methods of `TokenizerManager` that record the distribution of experts.

    Raises:
        HTTPException: status 400, if the server has no recorder.
    """
    if resolving_view(manager.server_args).expert_distribution_recorder_mode is None:
        raise HTTPException(400, "start the server with --expert-distribution-recorder-mode")


def refuse_without_memory_saver(manager: Any, *_: Any, **__: Any) -> None:
    """Before the methods of `TokenizerManager` that release and resume memory.

    Raises:
        HTTPException: status 400, if the server has no memory saver.
    """
    if not resolving_view(manager.server_args).enable_memory_saver:
        raise HTTPException(400, "start the server with --enable-memory-saver")


def check_logging(_manager: Any, settings: Any) -> None:
    """Before `TokenizerManager.configure_logging`.

    Raises:
        HTTPException: status 400, for a level that SGLang does not know.
    """
    level = settings.log_requests_level
    if level is not None and level not in LOG_LEVELS:
        raise HTTPException(400, f"log_requests_level: {level}; 0 to 3 is required")


def _unreadable(error: Exception) -> str:
    return f"a field has a value that SGLang cannot read ({type(error).__name__}: {error})"
