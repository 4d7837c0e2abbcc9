"""A draft that computes NaN or Inf: its ids stay valid, other requests do not notice, and it is
counted."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sglang_dflash.drafting.attention.table import RequestSlots
from sglang_dflash.drafting.draft_counters import DraftCounters, DraftCounts
from sglang_dflash.drafting.drafter import Drafter, nonfinite_rows
from sglang_dflash.drafting.heads.head import TargetHead
from sglang_dflash.drafting.noise import likeliest
from sglang_dflash.drafting.options import Options
from sglang_dflash.drafting.parallel import TensorParallel, argmax_of_shards
from tests.conftest import kv_groups, random_model, raw_config

VOCAB, BLOCK, TOKENS = 64, 4, 10


def drafter(window: int | None = None, entries: int = 40) -> Drafter:
    model = random_model(raw_config())
    options = Options(verify_block=BLOCK, window=window).resolve(model.config)
    embed = torch.randn(VOCAB, model.config.hidden_size)
    head = TargetHead(lambda ids: embed[ids], lambda hidden: hidden @ embed.T)
    return Drafter(model, head, kv_groups(model, options, 40, entries), options)


def propose(drafter: Drafter, requests: int = 2) -> torch.Tensor:
    """Absorb `TOKENS` tokens of every request, then draft a block of each."""
    slots = torch.arange(requests * TOKENS, dtype=torch.int32).view(requests, TOKENS)
    hidden = torch.randn(
        requests * TOKENS, drafter.model.config.target_hidden_width, generator=torch.Generator()
    )
    with torch.inference_mode():
        positions = torch.arange(TOKENS).repeat(requests)
        drafter.absorb(hidden, positions, slots.flatten().long())
        rows, lengths = torch.arange(requests), torch.full((requests,), TOKENS)
        return likeliest(drafter.propose(rows, RequestSlots(slots, rows, lengths, TOKENS)))


def counts(drafter: Drafter) -> DraftCounts:
    drafter.counters.send()
    return drafter.counters.read()


@pytest.mark.parametrize("scale", [math.nan, math.inf, 1e38])
def test_drafted_ids_stay_valid_and_are_counted(scale: float) -> None:
    """NaN and Inf in a norm's weight; and a finite weight with which the logits overflow."""
    broken = drafter()
    broken.model.norm.weight.data.fill_(scale)
    block = propose(broken)
    assert block[:, 0].tolist() == [0, 1]
    assert (block[:, 1:] == broken.model.config.mask_token_id).all()
    assert counts(broken).nonfinite == 2 * (BLOCK - 1)


class Launches(TorchDispatchMode):
    """Counts operations that would launch a kernel."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("place", [0, 5, -1])
def test_all_features_are_judged_in_three_launches(dtype: torch.dtype, place: int) -> None:
    """A prompt's are computed without a recording: each launch costs the host some microseconds."""
    largest = torch.finfo(dtype).max
    values = torch.tensor([0, -0.0, largest, -largest, math.inf, -math.inf, math.nan], dtype=dtype)
    features = torch.ones(len(values), 7, dtype=dtype)
    features[:, place] = values
    with Launches() as launches:
        broken = nonfinite_rows(features)
    assert broken.tolist() == [False] * 4 + [True] * 3
    assert launches.count == 3


def test_large_features_are_sound() -> None:
    """Their sum is beyond float16's range."""
    assert not nonfinite_rows(torch.full((1, 4096), 1000.0, dtype=torch.float16)).any()


def test_one_feature_that_overflows_counts() -> None:
    """The norm makes zeros of all other features, as in float16."""
    broken = drafter()
    broken.model.fc.weight.data[5] = 3e38
    hidden = torch.ones(4, broken.model.config.target_hidden_width)
    features = broken.model.context_features(hidden)
    assert features.isfinite().all(0).tolist() == [at != 5 for at in range(features.shape[1])]
    with torch.inference_mode():
        broken.absorb(hidden, torch.arange(4), torch.arange(4))
    assert counts(broken).nonfinite == 4


def test_a_sound_draft_counts_nothing() -> None:
    sound = drafter()
    block = propose(sound)
    assert (block >= 0).all() and (block < VOCAB).all()
    assert counts(sound) == DraftCounts()


def test_one_broken_token_is_no_other_requests_problem() -> None:
    """An entry of NaN would be masked for others, but a masked entry takes part in 0 * V."""
    broken = drafter()
    hidden = torch.full((1, broken.model.config.target_hidden_width), math.nan)
    with torch.inference_mode():
        broken.absorb(hidden, torch.tensor([9]), torch.tensor([39]))
    assert broken.groups[0].cache.kv.isfinite().all()
    assert counts(broken).nonfinite == 1


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_kv_that_overflows_is_no_other_requests_problem(value: float) -> None:
    """A projection of sound features may overflow. Of request 0, whose last tokens are rejected and
    so written to the spare entry, which request 1 reads, masked, where its context ends."""
    slots = torch.arange(2 * TOKENS, dtype=torch.int32).view(2, TOKENS)
    lengths = torch.tensor([TOKENS - 2, TOKENS - 5])
    requests = RequestSlots(slots, torch.arange(2), lengths, TOKENS)
    committed = torch.arange(TOKENS) < lengths[:, None]

    def hidden_states(first: float | None) -> torch.Tensor:
        torch.manual_seed(0)
        tested = drafter()
        hidden = torch.randn(2 * TOKENS, tested.model.config.target_hidden_width)
        project = tested.model.project_context

        def overflowing(features: torch.Tensor) -> torch.Tensor:
            kv = project(features)
            if first is not None:
                kv[:TOKENS] = first
            return kv

        tested.model.project_context = overflowing  # type: ignore[method-assign]
        with torch.inference_mode():
            positions = torch.arange(TOKENS).repeat(2)
            tested.absorb(hidden, positions, slots.flatten().long(), committed.flatten())
            assert tested.groups[0].cache.kv.isfinite().all()
            return tested.forward(torch.arange(2), requests)

    assert torch.equal(hidden_states(value)[1], hidden_states(None)[1])


def test_rejected_tokens_are_not_counted() -> None:
    broken = drafter()
    hidden = torch.full((3, broken.model.config.target_hidden_width), math.inf)
    with torch.inference_mode():
        broken.absorb(hidden, torch.arange(3), torch.arange(3), torch.tensor([True, False, False]))
    assert counts(broken).nonfinite == 1


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_logit_that_is_not_finite_gives_no_id(ranks: int, value: float) -> None:
    logits = torch.randn(3, VOCAB)
    logits[1, 7] = value
    logits[2, 7] = -math.inf  # A masked token: no harm.
    half = VOCAB // ranks

    def gather(x: torch.Tensor) -> torch.Tensor:
        """Return the maxima as if every rank had its own half of the vocabulary."""
        parts = [logits[:, i * half : (i + 1) * half].max(-1) for i in range(ranks)]
        return torch.stack(
            [torch.stack((p.values, (p.indices + i * half).float())) for i, p in enumerate(parts)]
        )

    tp = TensorParallel(0, ranks, all_gather=gather)
    ids = argmax_of_shards(logits[:, :half], 0, tp)
    assert ids.tolist() == [int(logits[0].argmax()), -1, int(logits[2].argmax())]


def test_a_bounded_cache_counts_the_context_that_it_held() -> None:
    whole, small = drafter(window=8), drafter(window=8, entries=12)
    propose(whole)
    assert counts(whole) == DraftCounts(0, 16, 16)
    propose(small)
    found = counts(small)
    assert found.context_sought == 16 and found.context_found < 16
    assert found.context_share == found.context_found / 16


def test_a_cache_that_loses_nothing_is_not_counted() -> None:
    whole = drafter()
    propose(whole)
    assert counts(whole).context_share is None


def test_the_host_sees_what_was_sent() -> None:
    counters = DraftCounters("cpu")
    counters.add_nonfinite(torch.tensor([True, True, False]))
    assert counters.read() == DraftCounts()
    counters.send()
    assert counters.read() - DraftCounts(1) == DraftCounts(1)
