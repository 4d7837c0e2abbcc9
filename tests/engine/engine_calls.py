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
# What is asked, and part of the error: one for each place that refuses.
CALLS: dict[str, tuple[dict[str, Any], str]] = {
    "no tokens": ({"prompt": ""}, "no tokens; a prompt needs at least 1"),
    "top_k": ({"prompt": "x", "sampling_params": {"top_k": 2**40}}, TOP_K),
    "list": ({"prompt": ["x", "y"], "sampling_params": [GREEDY]}, "a list of 1 for a batch of 2"),
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
