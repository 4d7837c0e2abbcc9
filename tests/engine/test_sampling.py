"""Sampled requests without a seed follow the target's law; a seed that is ignored is warned of.

With a seed their tokens are plain decoding's: test_exactness.py.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest
import torch
from openai import OpenAI
from scipy.stats import chisquare
from transformers import AutoModelForCausalLM, AutoTokenizer

from sglang_dflash.bench.server import Server
from sglang_dflash.drafting.acceptance import target_probabilities
from tests.engine import workload
from tests.engine.servers import DFLASH, PAIR, SEEDED


@pytest.mark.server(SEEDED)
def test_a_seed_that_is_used_is_not_warned_of(answers: Any, server: Server) -> None:
    answers(SEEDED, workload.seeded)
    assert warnings_of(server) == []


@pytest.mark.server(DFLASH)
def test_an_ignored_seed_is_warned_of_once(server: Server) -> None:
    """SGLang drops seeds without --enable-deterministic-inference, with or without speculation.

    Other tests send seeds to this server too: the warning names the first that it saw."""
    client = OpenAI(base_url=f"{server.url}/v1", api_key="EMPTY")
    for seed in (4711, 4712):
        client.completions.create(
            model="default", prompt="import os\n", max_tokens=4, temperature=1.0, seed=seed
        )
        server.generate("import os\n", temperature=1.0, max_new_tokens=4, sampling_seed=seed)
    (warning,) = warnings_of(server)
    assert re.search(r"seed -?\d+, .*--enable-deterministic-inference", warning)


def warnings_of(server: Server) -> list[str]:
    lines = server.log.read_text().splitlines()
    return [line for line in lines if "a request has the seed" in line]


LAWS = [
    {"temperature": 1.0, "top_k": 6},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.2, "min_p": 0.05},
]


@pytest.mark.server(DFLASH)
@pytest.mark.parametrize("how", LAWS, ids=str)
def test_unseeded_samples_follow_the_targets_law(server: Server, how: dict[str, Any]) -> None:
    """480 pairs of tokens after one prompt; the second token comes from a verify step."""
    text = "def get(self, block=True, timeout=None):\n    if "
    draws = []
    for _ in range(10):
        answer = server.generate(text, **how, n=48, max_new_tokens=3, ignore_eos=True)
        draws += [tuple(a["output_ids"][:2]) for a in answer]
    target = AutoModelForCausalLM.from_pretrained(PAIR.target, dtype=torch.float32)
    ids = AutoTokenizer.from_pretrained(PAIR.target)(text, return_tensors="pt").input_ids

    def law(continued: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            logits = target(
                torch.cat([ids, torch.tensor([continued], dtype=torch.long)], 1)
            ).logits[0, -1]
        return target_probabilities(logits, **how)

    first = law([])
    expected = {
        (a, b): float(first[a] * p)
        for a in first.nonzero()[:, 0].tolist()
        for b, p in enumerate(law([a]).tolist())
        if p > 0
    }
    assert set(draws) <= set(expected)
    counts = Counter(draws)
    often = {pair for pair, p in expected.items() if p * len(draws) >= 5}
    observed = [counts[pair] for pair in often] + [
        sum(c for pair, c in counts.items() if pair not in often)
    ]
    likely = [expected[pair] * len(draws) for pair in often]
    likely.append(len(draws) - sum(likely))
    if likely[-1] < 1e-6:
        observed, likely = observed[:-1], likely[:-1]
    assert len(likely) > 2, "the target has no choice after this prompt: nothing would be tested"
    # By accident once in 10,000 runs.
    assert chisquare(observed, likely).pvalue > 1e-4
