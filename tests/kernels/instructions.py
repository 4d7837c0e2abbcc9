"""Number of instructions that a compiled kernel executes."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

import triton

WARP = 32


class Executed(NamedTuple):
    """Instructions of a thread on the shortest way through a kernel to its end, and on the longest.
    No thread ends early."""

    least: int
    most: int


class _Instruction(NamedTuple):
    address: int
    is_conditional: bool
    operation: str
    target: int | None


def executed(sass: str, turns: int = 1) -> Executed:
    """Count what a disassembled kernel executes.

    What it calls, such as the slow path of a division, is not counted.

    Args:
        sass: from `cuobjdump --dump-sass`.
        turns: of its loop, if it has one. Raises ValueError if it has two.
    """
    code = _instructions(sass)
    at = {one.address: i for i, one in enumerate(code)}
    back = [
        (at[one.target], i)
        for i, one in enumerate(code)
        if one.target is not None and one.target < one.address
    ]
    if len(back) > 1:
        raise ValueError(f"{len(back)} loops")
    least, most = [0] * (len(code) + 1), [0] * (len(code) + 1)
    for i in range(len(code) - 1, -1, -1):
        one = code[i]
        own = turns if any(first <= i <= last for first, last in back) else 1
        ways = []
        if one.target is not None and one.target > one.address:
            ways.append(at[one.target])
        # A loop goes on behind its last instruction.
        ends = one.operation in ("EXIT", "RET") or one.target is not None
        if one.is_conditional or not ends or (one.target or one.address) < one.address:
            ways.append(i + 1)
        least[i] = own + min((least[way] for way in ways), default=0)
        most[i] = own + max((most[way] for way in ways), default=0)
    return Executed(least[0], most[0])


def _instructions(sass: str) -> list[_Instruction]:
    """Parse up to the branch to itself behind the kernel; the rest is called or padding."""
    found = []
    line = r"/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+ )?([A-Z]\w*)(\.\S+)?(.*?);"
    for address, predicate, operation, _, rest in re.findall(line, sass):
        branch = re.search(r"(0x[0-9a-f]+)\s*$", rest) if operation == "BRA" else None
        target = int(branch[1], 16) if branch else None
        if target == int(address, 16):
            break
        # A uniform predicate may also be an operand.
        conditional = bool(predicate) or bool(branch and re.search(r"U?P\d", rest))
        found.append(_Instruction(int(address, 16), conditional, operation, target))
    return found


def dump(cubin: bytes, what: str) -> str:
    """Return what cuobjdump prints of a kernel: its `resource-usage` or its `sass`."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), f"--dump-{what}", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
