"""The commands that README and docs print."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass

from tests import ROOT

PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").glob("*.md")),
    ROOT / "examples/README.md",
    *sorted((ROOT / "launch/demo_models").glob("*/README.md")),
]
# What begins a command, in an indented line or between backticks.
PROGRAMS = (
    "bash", "curl", "git", "pip", "pipx", "pre-commit", "pytest", "python", "sglang",
    "sglang-dflash", "source", "torchrun", "uv",
)  # fmt: skip


@dataclass(frozen=True)
class Printed:
    """A command as printed, and the page that prints it."""

    page: str
    text: str

    @property
    def words(self) -> list[str]:
        return shlex.split(self.text, comments=True)

    def __str__(self) -> str:
        return f"{self.page}: {self.text[:60]}"


def commands(start: str = "") -> list[Printed]:
    """All commands that begin with `start`, continuation lines joined, in the order of the pages.

    A command stands on an indented line or between backticks, after variables if it sets some.
    `bash` and the like, a program without arguments, is none.
    """
    found: dict[Printed, None] = {}
    for page in PAGES:
        text = re.sub(r"\\\n\s*", "", page.read_text())
        for line in re.findall(r"^ {4}(\S.*)$|`([^`\n]+)`", text, re.M):
            command = re.sub(r"^(?:[A-Z_]+=\S+ )+", "", line[0] or line[1])
            program, _, rest = command.partition(" ")
            if program in PROGRAMS and rest and command.startswith(start):
                found[Printed(page.relative_to(ROOT).as_posix(), command)] = None
    return list(found)


def snippets() -> list[str]:
    """The Python of docs/serving.md, one string per block."""
    text = (ROOT / "docs/serving.md").read_text()
    return re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)
