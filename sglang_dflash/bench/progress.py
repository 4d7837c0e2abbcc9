"""How far a long run is, on stderr."""

from __future__ import annotations

import sys
from typing import Any

# Between two lines in a pipe or a file.
LINE_EVERY_S = 15.0


def progress_bar(total: int) -> Any:
    """A bar of tqdm over `total` steps; if stderr is no terminal, a line now and then.

    tqdm is imported only here: some experiments run on bare machines.
    """
    from tqdm import tqdm

    terminal = sys.stderr.isatty()
    seconds = 0.1 if terminal else LINE_EVERY_S
    return tqdm(total=total, dynamic_ncols=True, leave=not terminal, mininterval=seconds)
