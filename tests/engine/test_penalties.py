"""The reason for serving/step/penalty_counts.py: without it SGLang's penalties depend on the other
requests of the batch. With it they do not (test_exactness.py: `alone` and `joining`)."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine import workload
from tests.engine.servers import FEATURES_PLAIN, SGLANGS_PENALTIES


@pytest.mark.server(SGLANGS_PENALTIES)
@pytest.mark.recorded(FEATURES_PLAIN, workload.alone)
def test_answers_depend_on_the_batch_without_the_rows(answers: Any) -> None:
    """SGLang counts the prompt's last token, and every other a step late."""
    got = answers(SGLANGS_PENALTIES, workload.joining)
    expected = answers(FEATURES_PLAIN, workload.alone)
    same = [a["output_ids"] == b["output_ids"] for a, b in zip(got, expected, strict=True)]
    # Requests without a penalty agree.
    assert all(same[1::2]) and not all(same[::2])
