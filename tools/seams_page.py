"""Write the tables of docs/upgrading-sglang.md from the seams: `python tools/seams_page.py`."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from sglang_dflash.platform_cpu.seams import SEAMS as CPU_SEAMS  # noqa: E402
from sglang_dflash.repairs.seams import SEAMS as REPAIRS  # noqa: E402
from sglang_dflash.seam.seam import Seam  # noqa: E402
from sglang_dflash.serving.seams import REPLAY_SEAMS, SEAMS  # noqa: E402

PAGE = ROOT / "docs/upgrading-sglang.md"
TABLES = {"serving": SEAMS, "replay": REPLAY_SEAMS, "repairs": REPAIRS, "platform_cpu": CPU_SEAMS}


def table(rows: Iterable[Seam]) -> str:
    """A Markdown row per seam: target, kind, why it is there, and the test that shows it."""
    lines = ["| target | kind | without it | shown by |", "|---|---|---|---|"]
    for row in rows:
        file, _, name = row.proof.partition("::")
        target = row.target.replace("sglang.srt.", "srt.").replace("sglang.kernels.ops.", "ops.")
        proof = f"[{name}](../{file})"
        lines.append(f"| `{target}` | {row.kind.value} | {row.reason} | {proof} |")
    return "\n".join(lines)


def page(text: str) -> str:
    """`text` with every block between `<!-- seams NAME -->` and `<!-- end -->` written anew."""

    def block(match: re.Match[str]) -> str:
        return f"<!-- seams {match[1]} -->\n{table(TABLES[match[1]])}\n<!-- end -->"

    return re.sub(r"<!-- seams (\w+) -->\n.*?<!-- end -->", block, text, flags=re.S)


def main() -> None:
    PAGE.write_text(page(PAGE.read_text()))


if __name__ == "__main__":
    main()
