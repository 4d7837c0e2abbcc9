"""`sglang-dflash env --changes`: every change to SGLang and torch, from the patches tables."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Sequence
from typing import NamedTuple

from sglang_dflash.patches.patch import Patch
from sglang_dflash.plugins.repairs.patches import PATCHES as REPAIRS
from sglang_dflash.serving.patches import (
    BUILTIN_PATCHES,
    PATCHES,
    REPLAY_PATCHES,
    SAMPLING_PATCHES,
    WORKER_PATCHES,
)

_COLUMNS = 96


class PatchGroup(NamedTuple):
    """Changes that are made in the same processes.

    Attributes:
        plugin: the name in SGLANG_PLUGINS that makes them.
        where: a description of the processes.
    """

    plugin: str
    where: str
    rows: Sequence[Patch]


def groups() -> list[PatchGroup]:
    """Return all changes, by plugin. A change that two plugins make is listed twice."""
    # Imported late because it needs torch, and the command must start without it.
    from sglang_dflash.plugins.platform_cpu.patches import PATCHES as PLATFORM

    worker_only = [row for row in WORKER_PATCHES if row not in SAMPLING_PATCHES]
    return [
        PatchGroup("dflash", "every process of SGLang", PATCHES),
        PatchGroup("dflash", "a scheduler that our worker serves", worker_only),
        PatchGroup(
            "dflash", "a scheduler that our worker serves; dflash_repairs has them everywhere",
            SAMPLING_PATCHES,
        ),
        PatchGroup("dflash", "a scheduler whose recurrent layers are replayed", REPLAY_PATCHES),
        PatchGroup("dflash", "a scheduler that SGLang's worker serves", BUILTIN_PATCHES),
        PatchGroup(
            "dflash_repairs", "every process of SGLang",
            [row for row in REPAIRS if row not in SAMPLING_PATCHES],
        ),
        PatchGroup(
            "dflash_cpu", "every process of SGLang on a machine without accelerator", PLATFORM,
        ),
    ]  # fmt: skip


def as_rows() -> list[dict[str, str]]:
    """Return an object per change, for JSON."""
    return [
        {
            "plugin": group.plugin,
            "where": group.where,
            "target": row.target,
            "kind": row.kind.value,
            "reason": row.reason,
            "proof": row.proof,
        }
        for group in groups()
        for row in group.rows
    ]


def as_text() -> str:
    """Format the changes: the changed names, and what SGLang does without the change."""
    lines = [
        "Each name with how our function runs (before, after, around, or in place of it), and",
        "below it what SGLang does without the change.",
    ]
    for group in groups():
        lines += ["", f"{group.plugin}: {group.where} ({len(group.rows)} changes)"]
        for (patch_kind, reason), rows in itertools.groupby(
            group.rows, lambda r: (r.kind, r.reason)
        ):
            targets = [line for row in rows for line in _target_lines(row.target)]
            targets[-1] += f" ({patch_kind.value})"
            lines += ["", *targets]
            lines += textwrap.wrap(
                reason, _COLUMNS, initial_indent="    ", subsequent_indent="    "
            )
    return "\n".join(lines)


def _target_lines(target: str) -> list[str]:
    """Return a dotted name in a line, or in two lines if it is long."""
    if len(target) < _COLUMNS - 12:
        return [f"  {target}"]
    parent, _, name = target.rpartition(".")
    return [f"  {parent}", f"      .{name}"]
