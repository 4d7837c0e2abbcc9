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


class Group(NamedTuple):
    """Changes that are made together.

    Attributes:
        plugin: the name in SGLANG_PLUGINS that installs them.
        where: the processes that have them.
    """

    plugin: str
    where: str
    rows: Sequence[Patch]


def groups() -> list[Group]:
    """All changes, by plugin. Those that two plugins make stand under both."""
    # It needs torch, which a command's start does without.
    from sglang_dflash.plugins.platform_cpu.patches import PATCHES as PLATFORM

    ours = [row for row in WORKER_PATCHES if row not in SAMPLING_PATCHES]
    return [
        Group("dflash", "every process of SGLang", PATCHES),
        Group("dflash", "a scheduler that our worker serves", ours),
        Group(
            "dflash", "a scheduler that our worker serves; dflash_repairs has them everywhere",
            SAMPLING_PATCHES,
        ),
        Group("dflash", "a scheduler whose recurrent layers are replayed", REPLAY_PATCHES),
        Group("dflash", "a scheduler that SGLang's worker serves", BUILTIN_PATCHES),
        Group(
            "dflash_repairs", "every process of SGLang",
            [row for row in REPAIRS if row not in SAMPLING_PATCHES],
        ),
        Group("dflash_cpu", "every process of SGLang on a machine without accelerator", PLATFORM),
    ]  # fmt: skip


def as_rows() -> list[dict[str, str]]:
    """One object per change, for JSON."""
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
    """The changes for reading: what is changed, and what SGLang does without it."""
    lines = [
        "Each name with how our function runs (before, after, around, or in place of it), and",
        "below it what SGLang does without the change.",
    ]
    for group in groups():
        lines += ["", f"{group.plugin}: {group.where} ({len(group.rows)} changes)"]
        for (kind, reason), rows in itertools.groupby(group.rows, lambda r: (r.kind, r.reason)):
            targets = [line for row in rows for line in _target_lines(row.target)]
            targets[-1] += f" ({kind.value})"
            lines += ["", *targets]
            lines += textwrap.wrap(
                reason, _COLUMNS, initial_indent="    ", subsequent_indent="    "
            )
    return "\n".join(lines)


def _target_lines(target: str) -> list[str]:
    """A dotted name on a line, or on two before its last part."""
    if len(target) < _COLUMNS - 12:
        return [f"  {target}"]
    parent, _, name = target.rpartition(".")
    return [f"  {parent}", f"      .{name}"]
