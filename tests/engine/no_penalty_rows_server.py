"""`sglang.launch_server` without the seams of repairs/penalties.py.

A module for the nursery to run (see nursery.py): the scheduler process inherits what it changes.
"""

from __future__ import annotations

import runpy

from sglang_dflash.repairs import plugin, seams

if __name__ == "__main__":
    kept = tuple(row for row in seams.SEAMS if ".penalties:" not in str(row.ours))
    assert len(kept) == len(seams.SEAMS) - 3
    seams.SEAMS = plugin.SEAMS = kept
    runpy.run_module("sglang.launch_server", run_name="__main__")
