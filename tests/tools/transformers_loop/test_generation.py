"""Generation over Transformers on a tiny random pair: exact for any draft."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.stats import chisquare
from transformers import (
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from sglang_dflash.drafting.attention.table import RequestSlots
from sglang_dflash.drafting.drafter import Drafter
from sglang_dflash.drafting.model import DraftModel
from sglang_dflash.drafting.options import Options
from sglang_dflash.drafting.weights import load_model, save_model
from sglang_dflash.tools.bench.published_pair import plain_generate
from sglang_dflash.tools.transformers_loop import Sampler, prefill, spec_generate
from tests.conftest import random_model, raw_config
from tests.target_law import target_probabilities
from tests.tools.transformers_loop.conftest import NEW_TOKENS, SHAPE, greedy, randomized


@pytest.mark.parametrize(
    "options",
    [Options(), Options(verify_block=7), Options(window=9, sinks=2)],
    ids=["defaults", "block-size", "window"],
)
def test_greedy_output_is_that_of_generate(
    target: Qwen3ForCausalLM, draft: DraftModel, options: Options
) -> None:
    for length in (1, 5, 40):
        ids = torch.randint(0, 64, (1, length))
        expected = greedy(target, ids)
        streamed: list[int] = []
        out = spec_generate(
            draft, target, ids, NEW_TOKENS, options=options, on_tokens=streamed.extend
        )
        assert out.tokens == expected == streamed
        # The first token comes from the prefill; what a last step has too much is not counted.
        assert sum(out.committed) == NEW_TOKENS - 1


def test_a_llama_target_as_in_the_published_example(draft: DraftModel) -> None:
    """Llama 3.1's layers: no norms on q and k, an untied lm_head, and its rotary scaling."""
    torch.manual_seed(6)
    rope = {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = LlamaConfig(**SHAPE, tie_word_embeddings=False, rope_parameters=rope)
    target = randomized(LlamaForCausalLM(config))
    ids = torch.randint(0, 64, (1, 30))
    expected = greedy(target, ids)
    assert spec_generate(draft, target, ids, NEW_TOKENS).tokens == expected
    assert len(set(expected)) > 5


@pytest.mark.parametrize("architecture", ["Qwen3", "GptOss"])
def test_a_target_with_sliding_layers(architecture: str, draft: DraftModel) -> None:
    """A prompt below, at and beyond the window, and texts that pass it. A prefill serves twice."""
    torch.manual_seed(7)
    window = {"sliding_window": 12, "layer_types": 3 * ["sliding_attention", "full_attention"]}
    if architecture == "Qwen3":
        config = Qwen3Config(**SHAPE, **window, use_sliding_window=True)
        target = randomized(Qwen3ForCausalLM(config))
    else:
        experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "pad_token_id": None}
        target = randomized(GptOssForCausalLM(GptOssConfig(**SHAPE, **window, **experts)))
    for length in (1, 11, 12, 30):
        ids = torch.randint(0, 64, (1, length))
        expected, start = greedy(target, ids), prefill(draft, target, ids)
        for _ in range(2):
            assert spec_generate(draft, target, start, NEW_TOKENS).tokens == expected
            assert plain_generate(target, start, NEW_TOKENS, (), Sampler()) == expected


def test_samples_follow_the_targets_distribution(
    target: Qwen3ForCausalLM, draft: DraftModel
) -> None:
    """400 draws of two tokens; the second comes from a verify step. Fails for 1 seed in 10,000."""
    ids, how = torch.tensor([[3, 9, 27]]), {"temperature": 2.0, "top_k": 4}
    start = prefill(draft, target, ids)
    draws = Counter(
        tuple(spec_generate(draft, target, start, 2, choose=Sampler(**how)).tokens)
        for _ in range(400)
    )

    def probabilities(more: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            text = torch.cat([ids, torch.tensor([more], dtype=torch.long)], 1)
            return target_probabilities(target(text).logits[0, -1], **how)

    first = probabilities([])
    expected = {
        (a, b): float(first[a] * second[b]) * 400
        for a in first.nonzero()[:, 0].tolist()
        for second in [probabilities([a])]
        for b in second.nonzero()[:, 0].tolist()
    }
    assert set(draws) <= set(expected)
    often = [pair for pair, count in expected.items() if count >= 5]
    observed, means = [draws[p] for p in often], [expected[p] for p in often]
    if 400 - sum(means) > 1e-6:
        observed.append(400 - sum(observed))
        means.append(400 - sum(means))
    assert len(means) > 2 and chisquare(observed, means).pvalue > 1e-4


@pytest.mark.parametrize("kind", ["Qwen3_5", "Qwen3_5Moe", "Qwen3Next"])
def test_recurrent_targets(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three Gated DeltaNet layers and one of attention: exact, and a prefill serves repeatedly."""
    from transformers import AutoModelForCausalLM

    from tests.engine.hybrid import SHAPE as HYBRID
    from tests.engine.hybrid import save_random_hybrid

    save_random_hybrid(tmp_path / "target", kind)
    target = AutoModelForCausalLM.from_pretrained(tmp_path / "target", dtype=torch.float32)
    raw = raw_config(
        hidden_size=HYBRID["hidden_size"],
        vocab_size=HYBRID["vocab_size"],
        num_target_layers=4,
        block_size=8,
        dflash_config={"mask_token_id": 1023, "target_layer_ids": [0, 1, 2]},
    )
    save_model(random_model(raw), raw, tmp_path, torch.float32)
    draft = load_model(tmp_path, dtype=torch.float32)
    for length in (1, 3, 70):
        ids = torch.randint(0, 1000, (1, length), generator=torch.Generator().manual_seed(length))
        expected = greedy(target, ids)
        start = prefill(draft, target, ids)
        assert spec_generate(draft, target, start, NEW_TOKENS).tokens == expected
        with monkeypatch.context() as patch:
            patch.setattr(Drafter, "propose", informed(ids[0].tolist() + expected))
            out = spec_generate(draft, target, start, NEW_TOKENS)
        # The limit may cut the last step.
        assert out.tokens == expected and set(out.committed[:-1]) == {1, 8, 4, 6}


def informed(text: list[int]) -> Any:
    """`Drafter.propose` that knows 0, 7, 3 or 5 tokens of the text, in turn."""
    known = itertools.cycle([0, 7, 3, 5])

    def propose(
        self: Drafter, bonus: torch.Tensor, requests: RequestSlots, noise: Any = None
    ) -> torch.Tensor:
        at, size = int(requests.seq_lens), self.draft_block
        drafts = [*text[at + 1 : at + size], *[0] * size][: size - 1]
        right = next(known)
        wrong = [(t + 1) % 1000 for t in drafts]
        return torch.tensor([[int(bonus), *drafts[:right], *wrong[right:]]])

    return propose
