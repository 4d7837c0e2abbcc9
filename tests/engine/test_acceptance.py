"""Acceptance length: our worker, SGLang's built-in one and the offline loop agree."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from sglang_dflash.bench import load
from sglang_dflash.bench.server import Server
from sglang_dflash.drafting.weights import load_model
from sglang_dflash.facts.errors import Failed
from sglang_dflash.transformers_loop.generation import spec_generate
from tests.engine import workload
from tests.engine.servers import BUILTIN, DFLASH, PAIR, SIMULATED


@pytest.mark.server(DFLASH)
def test_as_the_offline_loop_over_transformers(answers: Any) -> None:
    texts, got = (of["demo"][:5] for of in (workload.prompts(), answers(DFLASH, workload.run)))
    target = AutoModelForCausalLM.from_pretrained(PAIR.target, dtype=torch.float32)
    tokenizer, draft = (
        AutoTokenizer.from_pretrained(PAIR.target),
        load_model(PAIR.draft, dtype=torch.float32),
    )
    tokens = steps = 0
    for text, answer in zip(texts, got, strict=True):
        out = spec_generate(
            draft, target, tokenizer(text, return_tensors="pt").input_ids, workload.NEW_TOKENS
        )
        assert out.tokens == answer["output_ids"]
        tokens, steps = tokens + len(out.tokens) - 1, steps + len(out.committed)
    assert workload.acceptance_length(got) == pytest.approx(tokens / steps, rel=0.01)


@pytest.mark.server(BUILTIN)
@pytest.mark.recorded(DFLASH, workload.run)
def test_as_the_built_in_worker(answers: Any) -> None:
    ours = workload.halved(answers(DFLASH, workload.run))["demo"]
    builtin = answers(BUILTIN, workload.some_short_and_demo)["demo"]
    assert workload.acceptance_length(ours) == pytest.approx(
        workload.acceptance_length(builtin), rel=0.01
    )


@pytest.mark.server(SIMULATED)
def test_a_simulated_acceptance_needs_no_weights(server: Server) -> None:
    """SGLang's variable for timing: both checkpoints are config files only, and every step commits
    the configured number of tokens on average."""
    report = server.dflash()
    assert report["simulated_acceptance"] == 3.5
    answers = [
        server.generate("def f(", temperature=0, max_new_tokens=200, ignore_eos=True)["meta_info"]
        for _ in range(4)
    ]
    assert all(answer["completion_tokens"] == 200 for answer in answers)
    assert 3.2 < server.dflash()["acceptance_length"] < 3.8
    with pytest.raises(Failed, match=r"simulates an acceptance of 3\.5; restart it without"):
        load.endpoint(server.url)
