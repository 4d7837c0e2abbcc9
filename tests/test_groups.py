"""Tests that share a server run in one process (`pytest -n 2 --dist loadgroup`)."""

from __future__ import annotations

import pytest


@pytest.mark.xdist_group("these")
def test_groups_are_in_force(request: pytest.FixtureRequest) -> None:
    """pytest-xdist adds the group to the node id; without that it ignores groups."""
    if not hasattr(request.config, "workerinput"):
        pytest.skip("pytest runs in one process")
    assert request.node.nodeid.endswith("@these")
