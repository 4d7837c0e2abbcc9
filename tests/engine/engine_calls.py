"""Calls of `sglang.Engine.generate` that are refused: `python -m tests.engine.engine_calls KWARGS`.

The last line that it prints is `RESULT`, then JSON: the error of every call, and whether a good
request is answered as before.
"""

from __future__ import annotations

import json
import sys
from typing import Any

GREEDY = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
CALLS: dict[str, dict[str, Any]] = {
    "no tokens": {"prompt": ""},
    "no tokens in a batch": {"input_ids": [[1], []]},
    "token above": {"input_ids": [1, 1024]},
    "top_k": {"prompt": "x", "sampling_params": {"top_k": 2**40}},
    "type": {"prompt": "x", "sampling_params": {"max_new_tokens": 2.5}},
    "top logprobs": {"prompt": "x", "return_logprob": True, "top_logprobs_num": 2000},
    "list": {"prompt": ["x", "y"], "sampling_params": [GREEDY]},
    "streamed": {"prompt": "x", "sampling_params": {"top_k": 2**40}, "stream": True},
}


def main() -> None:
    import sglang

    engine = sglang.Engine(**json.loads(sys.argv[1]))
    errors = {}
    try:
        before = engine.generate("import os\n", GREEDY)["output_ids"]
        for name, call in CALLS.items():
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
