"""Penalties of a drafted block: at each position SGLang's own after the tokens before it."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from sglang_dflash.drafting.ops import TorchOps
from sglang_dflash.serving.step import penalty_counts
from sglang_dflash.serving.step.penalties import BlockPenalties
from tests.serving.step.test_penalty_counts import (
    VOCAB,
    WAYS,
    Scheduler,
    applied,
    batch,
    expected,
    orchestrator,
    outputs,
    request,
    sglangs_init,
)

__all__ = ["sglangs_init"]

BLOCK = 6
# `min_new_tokens` that is reached inside the block, or long before it.
MORE: list[dict[str, Any]] = [
    *WAYS,
    {"min_new_tokens": 8, "presence_penalty": -0.7, "frequency_penalty": 0.7},
    {"min_new_tokens": 2, "repetition_penalty": 0.8},
]
CPU = torch.device("cpu")


def blocks(rows: int) -> torch.Tensor:
    """Drafts that repeat each other and the output, and tokens that end a request."""
    pick = random.Random(1)
    drafts = [[pick.choice([0, 1, 2, 3, 5, 20]) for _ in range(BLOCK)] for _ in range(rows)]
    return torch.tensor(drafts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [2, BLOCK])
@pytest.mark.parametrize("rows", [range(len(MORE)), range(1), range(4, 5)], ids=str)
def test_every_position_is_penalised_for_the_tokens_before_it(
    rows: range, width: int, dtype: torch.dtype
) -> None:
    ways, written = [MORE[i] for i in rows], [outputs(len(MORE))[i] for i in rows]
    logits = 9 * torch.randn(len(ways), width, VOCAB, generator=torch.Generator().manual_seed(0))
    assert_sglangs_penalties(ways, written, blocks(len(ways))[:, :width], logits.to(dtype))


def test_a_draft_that_repeats_itself_is_counted_one_by_one() -> None:
    """A multiple of the penalty rounds differently; logits near 0 show it."""
    ways = [{"frequency_penalty": 0.1 * i} for i in range(1, 9)]
    written = [[2] * i for i in range(len(ways))]
    block = torch.full((len(ways), BLOCK), 2)
    assert_sglangs_penalties(ways, written, block, torch.zeros(len(ways), BLOCK, VOCAB))


def assert_sglangs_penalties(
    ways: list[dict[str, Any]], written: list[list[int]], block: torch.Tensor, logits: torch.Tensor
) -> None:
    """Compare to the bit, so that near-ties fall as in plain decoding.

    Args:
        written: each request's output before the block.
        block: int64 `[R, W]`.
        logits: `[R, W, V]`.
    """
    for output, tokens in zip(written, block.tolist(), strict=True):
        output.append(tokens[0])
    made = orchestrator(batch(*(request(**way) for way in ways)))
    for row, output in enumerate(written):
        penalty_counts.count(made, torch.tensor([row]), torch.tensor([output]))
    got, ours = logits.clone(), BlockPenalties(8, BLOCK, CPU, TorchOps())
    ours.begin(made)
    ours.apply(got, block)
    # The first position is an ordinary decoding step.
    torch.testing.assert_close(got[:, 0], logits[:, 0], rtol=0, atol=0)
    for row, (way, output) in enumerate(zip(ways, written, strict=True)):
        for position in range(1, block.shape[1]):
            before = output + block[row, 1 : position + 1].tolist()
            wanted = expected(way, before, logits[row, position])
            torch.testing.assert_close(got[row, position], wanted, rtol=0, atol=0)


def test_a_block_that_was_not_counted_is_an_error() -> None:
    ours = BlockPenalties(8, BLOCK, CPU, TorchOps())
    made = orchestrator(batch(request(**WAYS[0])))
    block = blocks(1)
    ours.begin(made)
    ours.apply(torch.zeros(1, BLOCK, VOCAB), block)
    with pytest.raises(RuntimeError, match="not counted"):
        ours.apply(torch.zeros(1, BLOCK, VOCAB), block)


class Served:
    """Requests of a server of ours: `step` decodes once, as the scheduler would."""

    def __init__(self, *ways: dict[str, Any], overlap: bool = True) -> None:
        self.ours, self.overlap = BlockPenalties(8, BLOCK, CPU, TorchOps()), overlap
        self.scheduler = Scheduler()
        self.scheduler.draft_worker = SimpleNamespace(block_penalties=self.ours)
        self.batch = batch(*(request(**way) for way in ways))
        self.made = orchestrator(self.batch)
        self.batch.spec_algorithm = SpeculativeAlgorithm.DFLASH
        # Rows of the request-to-token table.
        self.batch.req_pool_indices = torch.tensor([5, 2, 7, 1][: len(ways)])

    def prefill(self, tokens: list[int]) -> None:
        self.batch.forward_mode = ForwardMode.EXTEND
        penalty_counts.count_newest(self.scheduler, self.batch, overlap=self.overlap)
        # As SGLang's sampler gives them.
        self.ours.commit(self.batch, torch.tensor(tokens, dtype=torch.int32)[:, None])

    def step(self, committed: list[list[int]]) -> None:
        self.batch.forward_mode = ForwardMode.DECODE
        penalty_counts.count_newest(self.scheduler, self.batch, overlap=self.overlap)
        width = max(map(len, committed))
        tokens = [one + [9] * (width - len(one)) for one in committed]
        lengths = torch.tensor([len(one) for one in committed])
        self.ours.commit(self.batch, torch.tensor(tokens), lengths)

    def counted(self) -> torch.Tensor:
        """Every row's logits after what was counted by the beginning of a next step."""
        self.step([[0]] * len(self.batch.reqs))
        return applied(self.made)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("way", MORE, ids=str)
def test_every_committed_token_counts_once(way: dict[str, Any], overlap: bool) -> None:
    served = Served(way, {}, overlap=overlap)
    served.prefill([4, 4])
    steps = [[[3, 3, 3, 6], [1]], [[6], [2, 2]], [[7, 3], [1, 1, 1, 1, 1, 1]]]
    for committed in steps:
        served.step(committed)
    output = [4, *(token for committed in steps for token in committed[0])]
    logits = torch.linspace(-2, 2, VOCAB)
    got = served.counted()
    torch.testing.assert_close(got[0], expected(way, output))
    torch.testing.assert_close(got[1], logits)
    waits = 4 if overlap and way else 0
    assert served.scheduler.waited == ["forward"] * waits


def test_a_row_that_is_used_again_begins_with_its_prompts_token() -> None:
    served = Served({"frequency_penalty": 0.5})
    served.prefill([4])
    served.step([[3, 3, 3]])
    served.made = orchestrator(served.batch)
    served.prefill([6])
    wanted = expected({"frequency_penalty": 0.5}, [6])
    torch.testing.assert_close(served.counted()[0], wanted)


def test_of_a_mixed_step_the_decoding_requests_count_their_last_block() -> None:
    """--enable-mixed-chunk: a prompt, then the newest token of each decoding request."""
    served = Served({"frequency_penalty": 0.5}, {"presence_penalty": 1.0})
    served.prefill([4, 4])
    served.step([[3, 3], [8, 6]])
    served.batch.forward_mode = ForwardMode.MIXED
    served.batch.decoding_reqs = served.batch.reqs[1:]
    penalty_counts.count_newest(served.scheduler, served.batch, overlap=True)
    got = applied(served.made)
    first = expected({"frequency_penalty": 0.5}, [4])
    torch.testing.assert_close(got[0], first)
    second = expected({"presence_penalty": 1.0}, [4, 8, 6])
    torch.testing.assert_close(got[1], second)
