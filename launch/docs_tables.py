"""Write the tables of the docs that repeat rows of the code.

    python launch/docs_tables.py [--check]

writes each table of `TABLES` between `<!-- generated: NAME -->` and `<!-- end -->` on a page of
docs/. With --check it writes nothing, and exits with 1 if a page is not current.
"""

from __future__ import annotations

import argparse
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields
from itertools import groupby
from pathlib import Path

from sglang_dflash.checkpoint.published import published, published_pairs, shipped
from sglang_dflash.drafting.options import Options
from sglang_dflash.memory.draft_memory import DraftMemory
from sglang_dflash.serving.metrics.figures import COUNTS, SET_UP
from sglang_dflash.serving.metrics.server_info import BUILTIN
from sglang_dflash.serving.start.flags import ALIASES, PREFIX, ServerFlags
from sglang_dflash.serving.start.unserved import IGNORED, UNSERVED, Ignored, Unserved
from sglang_dflash.tools.inspect.report import inspect as inspect_pair
from sglang_dflash.tools.inspect.serving import Serving

DOCS = Path(__file__).resolve().parent.parent / "docs"
MARKED = re.compile(r"(<!-- generated: ([\w-]+) -->\n).*?(<!-- end -->)", re.S)
# What serves, by its labels.
INFO = 'sglang_dflash_info{worker="sglang-dflash",block="16",window="all",version="0.1.0"}'
Rows = Iterable[Iterable[str]]


def table(head: Iterable[str], rows: Rows) -> str:
    """A table in Markdown."""
    cells = [list(head), *([cell.replace("|", r"\|") for cell in row] for row in rows)]
    lines = [f"| {' | '.join(row)} |".replace("|  |", "| |") for row in cells]
    lines.insert(1, f"{'|---' * len(cells[0])}|")
    return "".join(f"{line}\n" for line in lines)


def code(text: str) -> str:
    return f"`{text}`"


def flag(name: str) -> str:
    return code("--" + name.replace("_", "-"))


# -- docs/limits.md --------------------------------------------------------------------------------


def builtin_settings() -> str:
    """Settings with which SGLang's worker serves; those with the same reason are in one row."""
    by_reason = groupby(UNSERVED, lambda row: (row.why, row.instead))
    rows = [(", ".join(map(_setting, alike)), *cells) for cells, alike in by_reason]
    return table(("setting", "why", "to have ours"), rows)


def _setting(row: Unserved) -> str:
    return row.in_docs or re.sub(r"--[a-z-]+", r"`\g<0>`", row.setting)


def ignored_flags() -> str:
    """Flags of SGLang's that our worker does not read."""
    return table(("flag", "why"), [(_ignored(row), _why(row)) for row in IGNORED])


def _ignored(row: Ignored) -> str:
    names = (code(f"{name}..." if name.endswith("-") else name) for name in row.flags)
    cell = ", ".join(names)
    if row.followed:
        *others, last = map(code, row.followed)
        cell += f" other than {', '.join(others)} and {last}"
    return f"{cell} {row.in_docs}".rstrip()


def _why(row: Ignored) -> str:
    return ". ".join(filter(None, (row.why, row.note)))


# -- docs/flags.md ---------------------------------------------------------------------------------


def our_flags() -> str:
    """Our flags, and our spellings of SGLang's."""
    rows = [
        _flag_row(each.name, each.default, each.metadata["docs"]) for each in fields(ServerFlags)
    ]
    rows += [
        (
            flag(alias),
            "",
            f"the published spelling of {flag(name)}, with its values and default",
        )
        for alias, name in ALIASES.items()
    ]
    return table(("flag", "default", "meaning"), rows)


def _flag_row(name: str, default: str | None, docs: Mapping[str, str]) -> tuple[str, str, str]:
    shown = docs["otherwise"] if default is None else code(default)
    return flag(PREFIX + name), shown, docs["meaning"]


# -- docs/metrics.md -------------------------------------------------------------------------------


def server_info() -> str:
    """Keys of /server_info; those with the same meaning are in one row."""
    rows = [row for row in (*SET_UP, *COUNTS) if row.key]
    return table(
        ("key", "meaning"),
        [
            (", ".join(code(row.key) for row in alike), meaning)
            for meaning, alike in groupby(rows, lambda row: row.meaning)
        ],
    )


def series() -> str:
    """Series of /metrics; those that are a key of /server_info, too, are in one row."""
    shown = {
        row: code(_series(row.series, row.label, row.goes_down)) for row in COUNTS if row.series
    }
    in_server_info = [row for row in shown if row.series == row.key and not row.goes_down]
    rows = [
        (code(INFO), 'gauge, always 1: what serves. `worker="builtin"` if SGLang\'s own does'),
        (", ".join(shown[row] for row in in_server_info), "as in `/server_info`"),
        *(
            (cell, f"gauge, 1 or 0: {row.meaning}" if row.goes_down else row.meaning)
            for row, cell in shown.items()
            if row not in in_server_info
        ),
    ]
    return table(("series", "counts"), rows)


def _series(name: str, label: str, goes_down: bool) -> str:
    labels = f'{{{label}="..."}}' if label else ""
    return f"sglang_dflash_{name}{'' if goes_down else '_total'}{labels}"


# -- docs/gpu.md -----------------------------------------------------------------------------------


def draft_memory() -> str:
    """The parts of `DraftMemory`, by its docstring."""
    documented = inspect.cleandoc(DraftMemory.__doc__ or "").partition("Attributes:\n")[2]
    texts = dict(re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", documented, re.M))
    rows = [
        (code(part), " ".join(texts[part].split()).removesuffix("."))
        for part in DraftMemory._fields
    ]
    return table(("part", "bytes, at most"), rows)


# -- docs/models.md --------------------------------------------------------------------------------


def published_drafts() -> str:
    """Drafts whose config is in the package."""
    head = ("target", "hybrid", "draft", "block", "draft layers", "more KV tokens", "served by")
    return table(head, (
        _draft_row(target, draft)
        for target, drafts in published_pairs().items()
        for draft in drafts
    ))  # fmt: skip


def _draft_row(target: str, draft: str) -> tuple[str, ...]:
    serving = Serving(max_running_requests=8, kv_memory_gib=16)
    facts = inspect_pair(shipped("target")[target], shipped("draft")[draft], Options(), serving)
    gain, reason = facts["target_tokens_gain"], facts["worker_reason"]
    worker = "SGLang's built-in worker" if facts["worker"] == BUILTIN else facts["worker"]
    return (
        target,
        "yes" if facts["recurrent_layers"] else "no",
        draft,
        str(facts["block_size"]),
        facts["draft_layers"],
        f"+{100 * gain:.1f} %" if gain else "none",
        f"{worker}: {reason}" if reason else worker,
    )


def other_drafts() -> str:
    """Drafts of which no source shows the whole config."""
    others = published()["others"]
    rows = [(name, facts["target"], facts["known"]) for name, facts in others.items()]
    return table(("draft", "target", "seen"), rows)


TABLES: Mapping[str, Callable[[], str]] = {
    "builtin-settings": builtin_settings,
    "ignored-flags": ignored_flags,
    "our-flags": our_flags,
    "server-info": server_info,
    "series": series,
    "draft-memory": draft_memory,
    "published-drafts": published_drafts,
    "other-drafts": other_drafts,
}


def pages() -> Iterator[Path]:
    """The pages that have a generated table."""
    return (page for page in sorted(DOCS.glob("*.md")) if MARKED.search(page.read_text()))


def marked(page: Path) -> Iterator[re.Match[str]]:
    """The generated tables of a page; group 2 is the name."""
    return MARKED.finditer(page.read_text())


def current(text: str) -> str:
    """Return a page's text with current tables. Raises KeyError if there is no such table."""
    return MARKED.sub(lambda match: f"{match[1]}\n{TABLES[match[2]]()}\n{match[3]}", text)


def main(argv: list[str] | None = None) -> int:
    """Write or check the tables. Returns the exit status."""
    parser = argparse.ArgumentParser(description="write the tables of docs/ that repeat the code")
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if one is old")
    check = parser.parse_args(argv).check
    old = [page for page in pages() if current(page.read_text()) != page.read_text()]
    for page in old:
        if check:
            print(f"{page.name} is not current: python launch/docs_tables.py", file=sys.stderr)
        else:
            page.write_text(current(page.read_text()))
    return int(check and bool(old))


if __name__ == "__main__":
    sys.exit(main())
