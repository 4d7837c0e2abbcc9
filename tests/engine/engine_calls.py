"""Calls of `sglang.Engine.generate` that are refused: `python -m tests.engine.engine_calls KWARGS`.

The last line that it prints is `RESULT`, then JSON: the error of every call, and whether a good
request is answered as before.
"""

from __future__ import annotations

import json
import sys
from typing import Any

GREEDY = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
TOP_K = f"top_k: {2**40}; an integer from 1 to {2**31 - 1}"
# What is asked, and part of the error.
CALLS: dict[str, tuple[dict[str, Any], str]] = {
    "no tokens": ({"prompt": ""}, "no tokens; a prompt needs at least 1"),
    "no tokens in a batch": ({"input_ids": [[1], []]}, "no tokens; a prompt needs at least 1"),
    "token above": (
        {"input_ids": [1, 1024]},
        "token 1 is 1024; token ids are integers from 0 to 1023",
    ),
    "top_k": ({"prompt": "x", "sampling_params": {"top_k": 2**40}}, TOP_K),
    "type": (
        {"prompt": "x", "sampling_params": {"max_new_tokens": 2.5}},
        "max_new_tokens: 2.5; Expected `int | null`",
    ),
    "top logprobs": (
        {"prompt": "x", "return_logprob": True, "top_logprobs_num": 2000},
        "2000; an integer from 0 to 1024",
    ),
    "list": (
        {"prompt": ["x", "y"], "sampling_params": [GREEDY]},
        "a list of 1 for a batch of 2",
    ),
    "streamed": ({"prompt": "x", "sampling_params": {"top_k": 2**40}, "stream": True}, TOP_K),
}


def main() -> None:
    import sglang

    engine = sglang.Engine(**json.loads(sys.argv[1]))
    errors = {}
    try:
        before = engine.generate("import os\n", GREEDY)["output_ids"]
        for name, (call, _) in CALLS.items():
            try:
                errors[name] = f"served: {list(engine.generate(**call))}"
            except Exception as error:
                errors[name] = f"{type(error).__name__}: {error}"
        same = engine.generate("import os\n", GREEDY)["output_ids"] == before
    finally:
        engine.shutdown()
    print("RESULT " + json.dumps({"errors": errors, "same": same}), flush=True)


if __name__ == "__main__":
    main()
