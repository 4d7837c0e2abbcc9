"""Batched decoding: the same texts as one at a time, and samples from the nucleus."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

from launch.draft_training import decoding
from launch.draft_training.decoding import DecodingJob, Nucleus
from tests.engine.hybrid import save_random_hybrid

END = 7


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=60, hidden_size=48, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=6, num_key_value_heads=2, head_dim=8, initializer_range=0.4,
        max_position_embeddings=512,
    )  # type: ignore[call-arg]  # fmt: skip
    return LlamaForCausalLM(config).eval()


def prompts(count: int) -> list[list[int]]:
    rng = random.Random(1)
    return [[rng.randrange(8, 60) for _ in range(rng.randint(2, 30))] for _ in range(count)]


def alone(target: PreTrainedModel, prompt: list[int], limit: int) -> list[int]:
    """Return the tokens that Transformers' own loop writes."""
    asked = torch.tensor([prompt])
    how = {"do_sample": False, "eos_token_id": END, "pad_token_id": 0, "max_new_tokens": limit}
    found = target.generate(asked, attention_mask=torch.ones_like(asked), **how)
    return found[0, len(prompt) :].tolist()


def test_greedy_texts_are_those_of_one_at_a_time(
    target: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Texts of many lengths, of which some end early, more than a batch holds, and a cache that
    grows."""
    monkeypatch.setattr(decoding, "ROOM", 5)
    monkeypatch.setattr(decoding, "TIDY", 3)
    asked, limit = prompts(23), 24
    expected = [alone(target, prompt, limit) for prompt in asked]
    assert 2 < sum(text[-1] == END for text in expected) < 20
    decoding.fast_decoding(target)
    jobs = [DecodingJob(prompt, limit, sampled=False) for prompt in asked]
    new = 0

    def report(count: int) -> None:
        nonlocal new
        new += count

    decoding.write(target, jobs, {END}, rows=8, nucleus=Nucleus(), loop_tokens=10**6, report=report)
    assert [job.tokens for job in jobs] == expected
    assert [job.ended for job in jobs] == [text[-1] == END for text in expected]
    assert new == sum(map(len, expected))


@pytest.mark.parametrize("model_type", ["gpt_oss", "gemma2", "mistral"])
def test_the_attention_is_the_targets_own(model_type: str) -> None:
    """Sinks, a cap of the scores, and a window that texts pass."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        model_type, vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, sliding_window=12,
        num_local_experts=4, attn_logit_softcapping=1.0, query_pre_attn_scalar=8,
    )  # fmt: skip
    target = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for parameter in target.parameters():
        torch.nn.init.normal_(parameter, std=0.5 if parameter.ndim > 1 else 1.0)
    asked, limit = prompts(9), 16
    expected = [alone(target, prompt, limit) for prompt in asked]
    with torch.no_grad():
        logits = target(torch.tensor([asked[0]])).logits
        decoding.fast_decoding(target)
        torch.testing.assert_close(target(torch.tensor([asked[0]])).logits, logits)
    jobs = [DecodingJob(prompt, limit, sampled=False) for prompt in asked]
    decoding.write(target, jobs, {END}, rows=4, nucleus=Nucleus(), loop_tokens=10**6)
    assert [job.tokens for job in jobs] == expected


def test_recurrent_layers_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    save_random_hybrid(tmp_path, "Qwen3_5")
    target = AutoModelForCausalLM.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="a target with recurrent layers"):
        decoding.fast_decoding(target)


def test_loops_are_cut(target: PreTrainedModel) -> None:
    loop = [11, 12, 13]
    job = DecodingJob([1], 100, sampled=False, tokens=[5, 6, *loop * 20])
    job.look_for_loop(tail=24)
    assert job.looped and job.is_done and len(job.tokens) == 2 + 24
    fine = DecodingJob([1], 100, sampled=False, tokens=list(range(60)))
    fine.look_for_loop(tail=24)
    assert not fine.looped and len(fine.tokens) == 60


def test_samples_are_of_the_nucleus() -> None:
    """Shares are those of the probabilities; a token outside is never drawn."""
    torch.manual_seed(0)
    p = torch.tensor([0.5, 0.3, 0.15, 0.04, 0.01])
    drawn = Nucleus(1.0, 0.9)(p.log().expand(20_000, -1))
    shares = drawn.bincount(minlength=5) / len(drawn)
    assert shares[3:].sum() == 0
    torch.testing.assert_close(shares[:3], p[:3] / p[:3].sum(), atol=0.02, rtol=0)
    cold = Nucleus(0.1, 1.0)(p.log().expand(1000, -1))
    assert cold.bincount(minlength=5)[0] > 980
