"""Tool calls in an answer of `/v1/messages` that is not streamed."""

from __future__ import annotations

import json
from typing import Any

from sglang_dflash.common.log import Log

logger = Log(__name__)


def clear_other_arguments(_serving: Any, response: Any) -> None:
    """Before `AnthropicServing._convert_response`: replace arguments that are no JSON object by an
    empty one, as SGLang does with arguments that are no JSON.

    A `tool_use` block can hold only an object. Chat completions and responses send the text.
    """
    calls = response.choices[0].message.tool_calls if response.choices else None
    for call in calls or ():
        text = call.function.arguments
        try:
            value = json.loads(text)
        except (ValueError, TypeError):
            # SGLang warns about these.
            continue
        if not isinstance(value, dict):
            logger.warning(
                "a tool was called with arguments that are no JSON object, which /v1/messages "
                "cannot show; its input is left empty"
            )
            call.function.arguments = "{}"
