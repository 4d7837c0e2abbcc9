"""The demo's figures."""

from __future__ import annotations

import pytest

from sglang_dflash.bench.demo import acceptance_between
from sglang_dflash.serving.metrics import AcceptanceCounts, RequestStep

FULL = RequestStep(drafts=7, accepted=7, tokens=8)


@pytest.mark.parametrize("earlier", [0, 1, 1237])
def test_the_acceptance_between_two_readings_is_exact(earlier: int) -> None:
    """13 steps of 8 tokens are 8.0. The mean before, 6.333..., is rounded in the report."""
    counts = AcceptanceCounts(8)
    counts.add([FULL, FULL, RequestStep(7, 2, 3)] * earlier)
    before = counts.report()
    assert acceptance_between(before, before) is None
    counts.add([FULL] * 13)
    assert acceptance_between(before, counts.report()) == 8.0
