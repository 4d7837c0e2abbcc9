"""The largest number of tokens of an answer of `/v1/responses`."""

from __future__ import annotations

from typing import Any

# What SGLang takes off, "for BOS/EOS the engine appends": it appends none.
HEADROOM = 2


def whole_budget(params: dict[str, Any], request: Any, *_args: Any, **_named: Any) -> Any:
    """After `ResponsesRequest.to_sampling_params`: `max_output_tokens` tokens, as asked."""
    if request.max_output_tokens is not None:
        params["max_new_tokens"] += HEADROOM
    return params
