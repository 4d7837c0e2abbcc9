"""The library files that the `code` pair has not seen, as its card lists them."""

from __future__ import annotations

import re
import sysconfig
from pathlib import Path

CARD = Path(__file__).parents[1] / "launch/demo_models/code/README.md"


def held_out_files() -> dict[str, str]:
    """File name -> text."""
    line = next(line for line in CARD.read_text().splitlines() if "**Held out**" in line)
    library = Path(sysconfig.get_path("stdlib"))
    names = re.findall(r"`([\w/]+\.py)`", line)
    assert len(names) == 31
    return {name: (library / name).read_text(encoding="utf-8") for name in names}
