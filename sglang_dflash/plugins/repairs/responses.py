"""The token limit of an answer of `/v1/responses`."""

from __future__ import annotations

from typing import Any

# Tokens that SGLang subtracts "for BOS/EOS the engine appends". It appends none.
HEADROOM = 2


def restore_budget(params: dict[str, Any], request: Any, *_args: Any, **_named: Any) -> Any:
    """After `ResponsesRequest.to_sampling_params`: allow all `max_output_tokens` tokens."""
    if request.max_output_tokens is not None:
        params["max_new_tokens"] += HEADROOM
    return params
