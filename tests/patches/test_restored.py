"""Temporary changes of attributes are put back, whatever happens."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sglang_dflash.patches.restored import restored


@pytest.mark.parametrize("fails", [False, True])
def test_attributes_are_put_back(fails: bool) -> None:
    owner = SimpleNamespace(one=1, two=[2], three=3)
    two = owner.two
    try:
        with restored(owner, "one", "two"):
            owner.one, owner.two, owner.three = None, [], 4
            if fails:
                raise KeyError
    except KeyError:
        assert fails
    assert (owner.one, owner.three) == (1, 4) and owner.two is two
