"""The `code` pair sampled at temperature 1, on text that neither of its models has seen.

python -m pytest tests/engine/test_code_pair.py -m long -s
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from sglang_dflash.bench.server import Server
from tests.engine import workload
from tests.engine.servers import CODE_PAIR, SEEDED_CODE, SEEDED_CODE_PLAIN

PROMPTS, NEW_TOKENS = 24, 64


def seeded(server: Server) -> list[Any]:
    def ask(job: tuple[int, str]) -> Any:
        number, text = job
        return server.generate(
            text, temperature=1.0, sampling_seed=number, max_new_tokens=NEW_TOKENS, ignore_eos=True
        )

    with ThreadPoolExecutor(6) as pool:
        return list(pool.map(ask, enumerate(CODE_PAIR.prompts[:PROMPTS])))


@pytest.mark.long
@pytest.mark.server(SEEDED_CODE)
@pytest.mark.recorded(SEEDED_CODE_PLAIN, seeded)
def test_seeded_samples_of_unseen_text_are_plain_decodings_tokens(answers: Any) -> None:
    ours, plain = answers(SEEDED_CODE, seeded), answers(SEEDED_CODE_PLAIN, seeded)
    workload.assert_same_outputs({"seeded": ours}, {"seeded": plain})
    assert len({tuple(answer["output_ids"]) for answer in ours}) == PROMPTS
    print(f"\nacceptance length at temperature 1: {workload.acceptance_length(ours):.3f}")
    assert workload.acceptance_length(ours) > 1.1
