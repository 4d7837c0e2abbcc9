"""Seeds of sampled requests, and whole sampled steps without a server."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sglang_dflash.serving.step import batch as our_batch
from sglang_dflash.serving.step.sampling import block_noise
from sglang_dflash.serving.step.seeds import Seeds
from tests.serving.batches import batch_of, request_of, sampling_info
from tests.serving.in_process import decode_of, filled, worker_of

DEVICE = torch.device("cpu")


def request(rid: str, seed: int | None = None, n: int = 1) -> Any:
    return request_of(rid, sampling_seed=seed, n=n)


def test_a_request_has_its_own_seed_or_a_drawn_one() -> None:
    seeds, other_server = Seeds(4, 1234, DEVICE), Seeds(4, 1235, DEVICE)
    assert seeds.of(request("a", -5)) == other_server.of(request("b", -5)) == -5
    # Two requests without a seed differ.
    drawn = [seeds.of(request(rid)) for rid in "abc"]
    assert len(set(drawn)) == 3
    assert all(-(2**63) <= seed < 2**63 for seed in drawn)
    assert other_server.of(request("a")) != drawn[0]
    # All answers to one prompt would be the same.
    assert seeds.of(request("a", 7, n=3)) == drawn[0]


def sampled(mode: str, rows: list[int], requests: list[Any], **info: Any) -> Any:
    return batch_of(
        *requests,
        forward_mode=ForwardMode[mode.upper()],
        req_pool_indices=torch.tensor(rows),
        sampling_info=sampling_info(**{"sampling_seed": None, **info}),
    )


def given(seeds: Seeds, batch: Any) -> Any:
    before = batch.sampling_info
    with seeds.given(batch):
        found = batch.sampling_info.sampling_seed
    assert batch.sampling_info is before and before.sampling_seed is None
    return None if found is None else found.tolist()


def test_a_seed_stays_with_its_request() -> None:
    """It stays from the prefill on, in batches of any order; a row's next request has its own."""
    seeds, a, b, c = Seeds(5, 9, DEVICE), request("a", 11), request("b", 12), request("c", 13)
    assert given(seeds, sampled("extend", [3, 1], [a, b])) == [11, 12]
    assert given(seeds, sampled("decode", [1, 3], [b, a])) == [12, 11]
    assert given(seeds, sampled("extend", [3], [c])) == [13]
    assert given(seeds, sampled("decode", [1, 3], [b, c])) == [12, 13]


def test_ids_that_are_used_again_make_no_answer_the_same() -> None:
    """A client may name each of its requests alike, one after the other. On every rank they have
    the same seeds."""
    ranks, found = (Seeds(4, 9, DEVICE), Seeds(4, 9, DEVICE)), list[list[int]]()
    for _ in range(3):
        batches = [sampled("extend", [1, 2], [request("a"), request("b", 7)]) for _ in ranks]
        first, second = map(given, ranks, batches)
        assert first == second and first[1] == 7
        assert given(ranks[0], sampled("decode", [1], [request("a")])) == first[:1]
        found.append(first)
    assert len({seed for seed, _ in found}) == 3


def test_sglangs_seeds_and_greedy_batches_are_left_alone() -> None:
    seeds, asked = Seeds(4, 9, DEVICE), torch.tensor([42])
    batch = sampled("extend", [1], [request("a", 7)], sampling_seed=asked)
    info = batch.sampling_info
    with seeds.given(batch):
        assert batch.sampling_info is info and info.sampling_seed is asked
    assert given(seeds, sampled("extend", [1], [request("a", 7)], is_all_greedy=True)) is None
    batch.sampling_info = None
    with seeds.given(batch):
        assert batch.sampling_info is None


def test_sampling_parameters_are_put_back_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(our_batch, "is_pin_memory_available", lambda _device: False)
    seeds, batch = Seeds(4, 9, DEVICE), sampled("extend", [1], [request("a", 7)])
    before = batch.sampling_info
    with pytest.raises(RuntimeError), seeds.given(batch):
        raise RuntimeError
    assert batch.sampling_info is before and before.sampling_seed is None


def test_a_greedy_request_has_no_noise() -> None:
    """SGLang gives it temperature 1 and top-k 1."""
    info = sampling_info(
        sampling_seed=torch.tensor([5, 6]),
        temperatures=torch.tensor([[1.0], [0.5]]),
        top_ks=torch.tensor([1, 20]),
    )
    noise = block_noise(info, torch.tensor([3, 4]))
    assert noise is not None and noise.temperatures.tolist() == [0.0, 0.5]
    info.is_all_greedy = True
    assert block_noise(info, torch.tensor([3, 4])) is None


@pytest.mark.parametrize("draws", [True, False])
@pytest.mark.parametrize(
    ("seeds", "n", "drawn"),
    [
        ((None, None), 1, [True, True]),
        ((7, None), 1, [False, True]),
        ((7, 8), 1, None),
        ((7, 8), 2, [True, True]),
    ],
)
def test_drafts_of_requests_without_a_seed_are_drawn(
    seeds: tuple[int | None, ...], n: int, drawn: list[bool] | None, draws: bool
) -> None:
    """And those of several answers to one prompt. With SGLang's sampler none is."""
    worker = filled(worker_of(), [9, 6])
    given: list[Any] = []

    def target_tokens(batch: Any, output: Any, block: Any, *others: Any) -> Any:
        given.append(others[-1])
        return output.next_token_logits.argmax(-1).view(block.shape)

    penalties = SimpleNamespace(commit=lambda *_: None)
    worker.target_tokens = Mock(
        side_effect=target_tokens, draws=lambda _: draws, penalties=penalties,
        single_token_mask=lambda *_: None,
    )  # fmt: skip
    batch = decode_of([9, 6], sampling_info=sampling_info(sampling_seed=None))
    for one, seed in zip(batch.reqs, seeds, strict=True):
        one.sampling_params.sampling_seed, one.sampling_params.n = seed, n
    worker.forward_batch_generation(batch)
    found = given[0].is_drawn.tolist()
    assert found == (drawn if draws and drawn else [False, False])
