"""Calls of tools in an answer of `/v1/messages` that is not streamed."""

from __future__ import annotations

import json
from typing import Any

from sglang_dflash.common.log import Log

logger = Log(__name__)


def keep_objects(_serving: Any, response: Any) -> None:
    """Before `AnthropicServing._convert_response`: arguments that are JSON, but no object, become
    an empty one, as SGLang does with those that are no JSON.

    A `tool_use` block has room for nothing else. Chat completions and responses send the text.
    """
    calls = response.choices[0].message.tool_calls if response.choices else None
    for call in calls or ():
        text = call.function.arguments
        try:
            value = json.loads(text)
        except (ValueError, TypeError):
            # SGLang warns, too.
            continue
        if not isinstance(value, dict):
            logger.warning(
                "a tool was called with arguments that are no JSON object, which /v1/messages "
                "cannot show; its input is left empty"
            )
            call.function.arguments = "{}"
