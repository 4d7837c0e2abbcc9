"""The table of published drafts, from the shipped facts: `python -m sglang_dflash.inspect_pair.models_page > docs/models.md`."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

from sglang_dflash.checkpoint.published import Pair, collection, shipped
from sglang_dflash.inspect_pair.inspection import inspect_draft

HEAD = """\
# Published drafts

Every draft of the z-lab DFlash collection. The page is written by

    python -m sglang_dflash.inspect_pair.models_page > docs/models.md

from the configs in [sglang_dflash/checkpoint/published](../sglang_dflash/checkpoint/published), and a test fails where the two differ. Each of those files says which
of its numbers were read, where, and which were inferred: no draft was downloaded for this table and none of these pairs has been run
with its published weights here.

- *block*: tokens verified per step, the bonus token included. *Draft layers*: how they attend, first to last.
- *Hybrid*: the target has recurrent layers (Gated DeltaNet), which follow an accepted prefix by replay.
- *Served by*: the worker that a server takes for that draft config. Server settings can decide otherwise, see the limits in the
  [README](../README.md). Where the facts leave open what decides it, the cell names what has not been seen; `sglang-dflash inspect TARGET
  DRAFT` on the checkpoint itself answers it.
- Some drafts were published twice; a name with `@` is our name for the earlier revision.

"""
COLUMNS = ("target", "hybrid", "draft", "block", "draft layers", "mask token", "served by", "facts")
README_COLUMNS = ("target", "hybrid", "draft", "block", "draft layers", "served by")


def page() -> str:
    """The whole of docs/models.md."""
    announced = ", ".join(collection().announced)
    return f"{HEAD}{table(COLUMNS)}\n\nAnnounced, and not seen: {announced}.\n"


def table(columns: tuple[str, ...]) -> str:
    """A row per published draft, with those of `COLUMNS`; README.md has it with `README_COLUMNS`."""
    at = [COLUMNS.index(column) for column in columns]
    rows = [row for pair in collection().pairs for row in _rows(pair)]
    return "\n".join(
        _line([row[i] for i in at]) for row in [COLUMNS, ("---",) * len(COLUMNS), *rows]
    )


def _rows(pair: Pair) -> Iterator[tuple[str, ...]]:
    for name in pair.drafts:
        facts = shipped("draft")[name]
        found = inspect_draft(facts)
        served = {
            "sglang-dflash": "sglang-dflash",
            "builtin": f"SGLang's built-in worker: {found.reason}",
        }
        yield (
            pair.target,
            "yes" if pair.hybrid else "no",
            name,
            _cell(found.block_size),
            _cell(found.says.draft_layers),
            _cell(found.says.mask_token_id),
            served.get(found.worker, f"open: {found.reason}"),
            f"[source](../sglang_dflash/checkpoint/published/{facts.file})",
        )


def _cell(value: object) -> str:
    return "not seen" if value is None else str(value)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.stdout.write(page())
