"""Sampled requests without a seed follow the target's law; a seed is honored by every server.

With a seed and deterministic inference their tokens are plain decoding's: test_exactness.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import cache
from typing import Any

import pytest
import torch
from openai import OpenAI
from scipy.stats import chisquare
from transformers import AutoModelForCausalLM, AutoTokenizer

from sglang_dflash.tools.bench.server import Server
from tests.engine.servers import DFLASH, PAIR
from tests.target_law import target_probabilities

TEXT = "def get(self, block=True, timeout=None):\n    if "


def sampled(server: Server, **how: Any) -> tuple[int, ...]:
    answer = server.generate(TEXT, temperature=1.0, max_new_tokens=16, ignore_eos=True, **how)
    return tuple(answer["output_ids"])


@pytest.mark.server(DFLASH)
def test_seeds_are_honored_and_drawn(server: Server) -> None:
    """This needs no --enable-deterministic-inference: the same seed, the same answer, by every API.
    Requests without a seed differ, and so do several answers to one prompt."""
    first, again, other = (sampled(server, sampling_seed=seed) for seed in (4711, 4711, 4712))
    assert first == again != other
    client = OpenAI(base_url=f"{server.url}/v1", api_key="EMPTY")
    asked: dict[str, Any] = {"model": "default", "temperature": 1.0, "seed": 4711}
    text = [
        client.completions.create(prompt=TEXT, max_tokens=16, **asked).choices[0].text
        for _ in range(2)
    ]
    assert text[0] == text[1]
    chats = [
        client.chat.completions.create(
            messages=[{"role": "user", "content": TEXT}], max_tokens=16, **{**asked, "seed": seed}
        ).choices[0].message.content
        for seed in (1, 1, 2)
    ]  # fmt: skip
    assert chats[0] == chats[1] != chats[2]
    assert len({sampled(server) for _ in range(3)}) == 3
    many = server.generate(TEXT, temperature=1.0, max_new_tokens=16, n=3, sampling_seed=4711)
    assert len({tuple(one["output_ids"]) for one in many}) == 3


LAWS = [
    {"temperature": 1.0, "top_k": 6},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.2, "min_p": 0.05},
]


@pytest.mark.server(DFLASH)
@pytest.mark.parametrize("how", LAWS, ids=str)
def test_unseeded_samples_follow_the_targets_law(server: Server, how: dict[str, Any]) -> None:
    """672 answers of three tokens to one prompt; the second and third come from verify steps.
    By accident it fails once in a million runs."""
    draws = list[tuple[int, ...]]()
    for _ in range(14):
        answer = server.generate(TEXT, **how, n=48, max_new_tokens=4, ignore_eos=True)
        draws += [tuple(a["output_ids"][:3]) for a in answer]
    target = AutoModelForCausalLM.from_pretrained(PAIR.target, dtype=torch.float32)
    ids = AutoTokenizer.from_pretrained(PAIR.target)(TEXT, return_tensors="pt").input_ids

    @cache
    def law(continued: tuple[int, ...]) -> torch.Tensor:
        with torch.inference_mode():
            text = torch.cat([ids, torch.tensor([continued], dtype=torch.long)], 1)
            return target_probabilities(target(text).logits[0, -1], **how)

    # The law of all that begins likely enough to be seen five times.
    expected: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        expected = {
            (*start, token): float(p * share)
            for start, p in expected.items()
            for token, share in enumerate(law(start).tolist())
            if p * share * len(draws) >= 5
        }
    for draw in draws:
        assert all(law(draw[:at])[draw[at]] > 0 for at in range(3) if draw[:at] in seen(expected))
    counts = Counter(draws)
    observed = [counts[draw] for draw in expected]
    likely = [p * len(draws) for p in expected.values()]
    rest = len(draws) - sum(likely)
    if rest >= 5:
        observed, likely = [*observed, len(draws) - sum(observed)], [*likely, rest]
    likely = [mean * sum(observed) / sum(likely) for mean in likely]
    assert len(likely) > 2, "the target has no choice after this prompt: nothing would be tested"
    assert chisquare(observed, likely).pvalue > 1e-6


def seen(draws: Iterable[tuple[int, ...]]) -> set[tuple[int, ...]]:
    """All beginnings of them."""
    return {draw[:at] for draw in draws for at in range(len(draw))}
