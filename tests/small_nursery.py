"""`tests.engine.nursery` that imports nothing first, for children that are not SGLang servers."""

from __future__ import annotations

from tests.engine import nursery

if __name__ == "__main__":
    nursery.prepare = lambda: None
    nursery.read_environment = lambda metrics: None
    nursery.main()
