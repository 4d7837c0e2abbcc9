"""The parts of `sglang-dflash check-gpu` by name, and the figures of each.

    python -m experiments gpu --dry-run
    python -m experiments gpu --out gpu.json

When a part ends it is shown on stderr, and --out is written anew; --only runs some of them, and
bandwidth. The exit status is 1 if a part failed; the other parts are reported.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sglang_dflash.tools.gpu_check import plan
from sglang_dflash.tools.gpu_check.plan import Options, failure, table

__all__ = ["Options", "failure", "run", "table"]


def run(options: Options) -> Iterator[dict[str, Any]]:
    """See `plan.run`."""
    yield from plan.run(options)
