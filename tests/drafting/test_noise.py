"""The noise of coupled drafts: SGLang's bit for bit, good as random numbers, and at its place."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from sglang.srt.layers import sampler as sglangs
from torch import Tensor

from sglang_dflash.checkpoint.draft_config import DraftConfig
from sglang_dflash.drafting.heads.head import DraftHead, TargetHead
from sglang_dflash.drafting.heads.plain import HeadModule
from sglang_dflash.drafting.noise import (
    SAMPLED,
    BlockNoise,
    SampledBlocks,
    gumbel,
    proposal_of,
    sampled,
)
from sglang_dflash.drafting.ops import TorchOps
from sglang_dflash.drafting.parallel import TensorParallel
from sglang_dflash.plugins.platform_cpu.torch_ops import murmur_hash32 as sglangs_hash
from tests.conftest import raw_config

VOCAB, BLOCK = 50, 4


@pytest.fixture
def _sglang_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sglangs, "murmur_hash32", sglangs_hash)
    with torch.compiler.set_stance("force_eager"):
        yield


def noise_of(temperatures: list[float]) -> BlockNoise:
    rows = len(temperatures)
    seeds = torch.tensor([42, 2**40 + 7, -3, 2**62])[:rows]
    return BlockNoise(seeds, torch.tensor(temperatures), torch.tensor([9, 14, 3, 2000])[:rows])


@pytest.mark.usefixtures("_sglang_on_a_cpu")
def test_a_draft_that_is_the_target_guesses_every_token() -> None:
    """The target's distribution in, SGLang's own sampled tokens out: same seeds, positions, ids."""
    temperatures = [1.0, 0.3, 1.5, 0.7]
    noise = noise_of(temperatures)
    logits = 3 * torch.randn(4, BLOCK - 1, VOCAB)
    coupled = noise.scores(logits, torch.arange(VOCAB)).argmax(-1)
    # As `TargetTokens` calls it: the token after block position i, at the position of i.
    positions = noise.seq_lens[:, None] + torch.arange(BLOCK - 1)
    log_p = (logits / noise.temperatures[:, None, None]).log_softmax(-1)
    theirs = sglangs.multinomial_with_seed(
        log_p.flatten(0, 1), noise.seeds.repeat_interleave(BLOCK - 1), positions.flatten()
    )
    assert torch.equal(coupled.flatten(), theirs[:, 0])
    # And with the noise of one position further, it does not.
    wrong = noise._replace(seq_lens=noise.seq_lens + 1).scores(logits, torch.arange(VOCAB))
    assert (wrong.argmax(-1) != coupled).any()


@pytest.mark.usefixtures("_sglang_on_a_cpu")
def test_the_noise_is_sglangs_bit_for_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds, positions, ids = torch.tensor([42, -7, 2**60]), torch.tensor([0, 5, 70000]), 4096
    seen: list[Tensor] = []
    own = torch.argmax

    def watched(x: Tensor, **how: Any) -> Tensor:
        seen.append(x.clone())
        return own(x, **how)

    monkeypatch.setattr(torch, "argmax", watched)
    sglangs.multinomial_with_seed(torch.zeros(3, ids), seeds, positions)
    ours = gumbel(seeds[:, None], positions[:, None], torch.arange(ids))
    assert torch.equal(seen[0], ours)


def blocks(tokens: Tensor) -> SampledBlocks:
    """Blocks by each rule `[2, R, B]`, each draft of which was drawn from one token."""
    candidates = tokens[SAMPLED, :, 1:, None]
    return SampledBlocks(tokens, candidates, torch.zeros_like(candidates).float())


def head_of(tp: TensorParallel, weight: Tensor, first_id: int = 0) -> DraftHead:
    target = TargetHead(lambda ids: ids, lambda x: x @ weight.T, first_id)
    config = DraftConfig.from_dict(raw_config())
    return HeadModule(config, tp, TorchOps()).over(target)


def test_a_head_drafts_by_both_rules_on_any_number_of_ranks() -> None:
    """A shard's noise is that of its tokens' ids in the whole vocabulary."""
    weight, hidden = torch.randn(VOCAB, 8), torch.randn(3, BLOCK, 8)
    noise, bonus = noise_of([1.0, 0.0, 5.0]), torch.zeros(3, dtype=torch.int64)
    head = head_of(TensorParallel(), weight)
    whole = head(hidden, bonus, noise)
    assert isinstance(whole, SampledBlocks)
    likeliest, coupled = whole.tokens
    assert torch.equal(likeliest, head(hidden, bonus, None))
    # A draft is one of the 16 likeliest tokens.
    logits, ids = (hidden[:, 1:] @ weight.T).topk(16)
    scores = noise.scores(logits, ids)
    assert torch.equal(coupled, ids.gather(-1, scores.argmax(-1, keepdim=True))[..., 0])
    assert torch.equal(whole.candidates, ids)
    heat = torch.tensor([1.0, 1.0, 5.0])[:, None, None]
    torch.testing.assert_close(whole.scores, logits / heat)
    # A greedy request has no noise.
    assert torch.equal(coupled[1], likeliest[1]) and (coupled != likeliest).any()
    sent: list[Tensor] = []
    tp = TensorParallel(0, 2, all_gather=lambda x: sent.append(x) or torch.stack((x, x)))
    for shard, first_id in zip(weight.chunk(2), (0, VOCAB // 2), strict=True):
        head_of(tp, shard, first_id)(hidden, bonus, noise)
    both = torch.stack(sent)
    tp = TensorParallel(0, 2, all_gather=lambda _: both)
    of_ranks = head_of(tp, weight[: VOCAB // 2])(hidden, bonus, noise)
    for part, expected in zip(of_ranks, whole, strict=True):
        torch.testing.assert_close(part, expected)


def test_drafts_of_sampled_requests_are_those_of_the_noise() -> None:
    """A proposer that ignores the noise returns one block."""
    block = torch.ones(1, BLOCK, dtype=torch.int64)
    assert sampled(block) is block
    # An odd number of tokens: the second half of them begins at no multiple of 16 bytes.
    drafted = torch.tensor([[[0, 1, 2]] * 3, [[0, 4, 5]] * 3])
    block = sampled(blocks(drafted))
    assert block.equal(drafted[1])
    # A kernel is compiled once more for such a pointer.
    assert drafted[1].data_ptr() % 16 and block.data_ptr() % 16 == 0


def test_what_a_step_verifies_was_drawn_or_not() -> None:
    """Greedy requests have a temperature of 0; a draft that is looked up was not drawn."""
    drafted = blocks(torch.zeros(2, 4, BLOCK, dtype=torch.int64))
    noise, block = noise_of([1.0, 0.0, 0.7, 0.7]), drafted.tokens[0]
    seeded, looks_up = torch.tensor([0, 0, 1, 0]).bool(), torch.tensor([0, 0, 0, 1]).bool()
    for given, expected in (
        ((None, None), [True, False, True, True]),
        ((seeded, looks_up), [True, False, False, False]),
    ):
        proposal = proposal_of(block, drafted, noise, *given)
        assert proposal is not None and proposal.is_drawn.tolist() == expected
    assert proposal_of(block, block, noise, None) is None
    assert proposal_of(block, block, None, None) is None
