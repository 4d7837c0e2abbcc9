"""Quantized drafts, served: plain decoding's answers, in as many steps as with a draft that has the
same values in plain weights. Two ranks: a row of test_exactness.py.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine import workload
from tests.engine.servers import DFLASH, FILES, PLAIN, ServerConfig

ASK = workload.some_short_and_demo


def served(export: str, weights: str) -> ServerConfig:
    folder = f"{FILES}/draft-{export}/{weights}"
    return DFLASH.named(f"{export}-{weights}").having(speculative_draft_model_path=folder)


def cases() -> Any:
    for export in ("W4A16-zero-points", "FP8", "ModelOpt-NVFP4", "AWQ"):
        recorded = pytest.mark.recorded(served(export, "plain"), ASK)
        yield pytest.param(served(export, "quantized"), export, id=export, marks=recorded)


@pytest.mark.long
@pytest.mark.recorded(PLAIN, workload.run)
@pytest.mark.parametrize(("config", "export"), cases())
def test_a_quantized_draft_is_as_good_as_its_values(
    config: ServerConfig, export: str, answers: Any
) -> None:
    ours, twin = answers(config, ASK), answers(served(export, "plain"), ASK)
    workload.assert_same_outputs(ours, workload.half_of_two(answers(PLAIN, workload.run)))
    workload.assert_same_outputs(ours, twin)
    steps, expected = (workload.counted(made["demo"]) for made in (ours, twin))
    assert steps == expected and steps.acceptance_length > 3
