"""The table of published drafts, from the shipped facts. Run from the root of a checkout:

python tools/models_page.py > docs/models.md
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

from sglang_dflash.facts.published import Pair, collection, shipped
from sglang_dflash.inspect.report import inspect_draft

HEAD = """\
# Published drafts

Every draft of the z-lab DFlash collection. This page is written by

    python tools/models_page.py > docs/models.md

from the configs in [sglang_dflash/facts/published](../sglang_dflash/facts/published), and
a test fails if the two differ. Each of those files gives the source of its numbers and tells which
were read and which were inferred. No draft was downloaded for this table, and none of these pairs
has been run here with its published weights.

- *block*: tokens verified per step, the bonus token included.
- *draft layers*: how they attend, first to last.
- *hybrid*: the target has recurrent layers (Gated DeltaNet), which follow an accepted prefix by
  replay.
- *served by*: the worker that a server chooses for that draft config. Server settings can change
  the choice, see the [limits](limits.md). If the facts leave it open, the cell
  names the fields that were not seen; `sglang-dflash inspect TARGET DRAFT` on the checkpoint
  itself answers it.
- Sliding layers of a draft whose config does not set `is_causal` are causal and windowed inside the
  block, too, as in SGLang's built-in worker. z-lab's code leaves the block out of the window if
  Transformers runs it with eager or SDPA attention: hidden states then differ, and
  agree once it gets a causal sliding mask. The published figures were measured with SGLang's
  reading. Outputs are the target's under both.
- Some drafts were published twice. A name with `@` is our name for the earlier revision.

"""
COLUMNS = ("target", "hybrid", "draft", "block", "draft layers", "mask token", "served by", "facts")


def page() -> str:
    """The text of docs/models.md."""
    announced = ", ".join(collection().announced)
    return f"{HEAD}{table()}\n\nAnnounced, and not seen: {announced}.\n"


def table() -> str:
    """A row per published draft."""
    rows = [row for pair in collection().pairs for row in _rows(pair)]
    return "\n".join(map(_line, (COLUMNS, ("---",) * len(COLUMNS), *rows)))


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
            _cell(found.description.draft_layers),
            _cell(found.description.mask_token_id),
            served.get(found.worker, f"unknown: {found.reason}"),
            f"[source](../sglang_dflash/facts/published/{facts.file})",
        )


def _cell(value: object) -> str:
    return "not seen" if value is None else str(value)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.stdout.write(page())
