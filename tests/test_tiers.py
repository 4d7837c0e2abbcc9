"""The tests that run in each tier, and their process (`launch/test.sh`)."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.conftest import ENGINE, KERNELS, ON_REQUEST


@pytest.mark.xdist_group("these")
def test_groups_are_in_force(request: pytest.FixtureRequest) -> None:
    """pytest-xdist adds the group to the node id; without that it ignores groups, and every server
    starts once per process."""
    if not request.config.getoption("loadgroup", False):
        pytest.skip("not run by launch/test.sh")
    assert request.node.nodeid.endswith("@these")


def test_folders_that_the_fast_tier_skips_hold_no_fast_test(request: pytest.FixtureRequest) -> None:
    skipped = (item for item in request.session.items if {ENGINE, KERNELS} & {*item.path.parents})
    assert not [item.nodeid for item in skipped if item.get_closest_marker("fast")]


def test_tiers_on_request_are_left_out_unless_named(request: pytest.FixtureRequest) -> None:
    """Kernels may be in `gpu` beside their own tier."""
    asked = request.config.getoption("markexpr")
    unnamed = {tier for tier in ON_REQUEST if tier not in asked}
    items = (item for item in request.session.items if KERNELS not in item.path.parents)
    assert not [item.nodeid for item in items if unnamed & {m.name for m in item.iter_markers()}]


def test_servers_on_a_gpu_are_collected_without_plugins_of_pytest() -> None:
    """A GPU may be lent without them."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "gpu"]
    without = ("-p", "no:xdist", "-p", "no:timeout", "-p", "no:cacheprovider")
    file = ENGINE / "test_gpu_servers.py"
    done = subprocess.run([*command, *without, file], capture_output=True, text=True)
    assert done.returncode == 0 and f"{file.name}::" in done.stdout, done.stdout
