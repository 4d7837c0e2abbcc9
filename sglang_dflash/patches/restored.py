"""Change fields of SGLang's or torch's objects for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def restored(owner: Any, *names: str) -> Iterator[None]:
    """Put these attributes of `owner` back at the end, also after an exception.

    A server lives on after a failed step (`plugins/repairs/containment.py`), and serves with what
    the step has left.
    """
    before = {name: getattr(owner, name) for name in names}
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)
