"""Lookup in our worker, without a server: the texts that it keeps, and what it reads of them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from typing import Any

import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from torch import Tensor

from sglang_dflash.drafting.acceptance import Accepted, accept
from sglang_dflash.drafting.attention.table import RequestSlots
from sglang_dflash.serving.step.batch import draft_input
from tests.serving.batches import request_of
from tests.serving.in_process import (
    COLUMNS,
    ROWS,
    VOCAB,
    decode_of,
    prefill_of,
    widths_of,
    worker_of,
)
from tests.serving.step.test_step_width import Scripted

# The second one's prompt is another prompt's and a bit more: its first half repeats itself.
PROMPTS = [[3, 4, 5, 6, 3, 4, 5, 6, 3], [9, 8, 7, 1, 2, 9, 8, 7, 1]]


def requests(prompts: Sequence[list[int]]) -> list[Any]:
    return [request_of(str(i), ids) for i, ids in enumerate(prompts)]


def texts_after(worker: Any, steps: int, poison: Tensor) -> tuple[list[list[int]], list[Tensor]]:
    """Return the texts that `PROMPTS` have become, and the blocks verified on the way. The prefix
    cache holds three tokens of the second one."""
    worker.lookup.texts.copy_(poison)
    worker.target_forward.is_plain_decoding = lambda width: False
    lengths = [len(ids) for ids in PROMPTS]
    prefill = prefill_of([0, 3], lengths)
    prefill.reqs = requests(PROMPTS)
    # The target agrees with the first draft.
    blocks: list[Tensor] = []

    def accept(block: Tensor, target: Tensor) -> Accepted:
        blocks.append(block.clone())
        lengths = torch.full((2,), min(2, block.shape[1]))
        tokens = torch.cat((block[:, 1:], target[:, -1:]), 1)
        return Accepted(lengths, tokens, target[:, 0])

    worker.accept = accept
    result = worker.forward_batch_generation(prefill)
    written, bonus = [list(ids) for ids in PROMPTS], result.next_token_ids
    for _ in range(steps):
        seq_lens = result.new_seq_lens
        batch = decode_of(seq_lens.tolist(), reqs=requests(PROMPTS))
        batch.spec_info = draft_input(bonus, seq_lens, in_flight=1)
        result = worker.forward_batch_generation(batch)
        taken = (result.new_seq_lens - seq_lens).tolist()
        for text, block, count in zip(written, blocks[-1].tolist(), taken, strict=True):
            text += block[:count]
        bonus = result.next_draft_input.bonus_tokens
    return written, blocks


@pytest.mark.parametrize(("steps", "verify_block"), [(1, None), (6, None), (3, 12)])
def test_the_texts_are_what_was_committed_and_nothing_else_is_read(
    steps: int, verify_block: int | None
) -> None:
    """Whatever the table holds elsewhere: another request's tokens, or another's in the same row
    before. Steps have every width, 1 included."""
    outcomes = []
    others = torch.tensor([3, 4, 5, 6]).repeat(ROWS, COLUMNS // 4)
    for poison in (torch.zeros_like(others), others):
        torch.manual_seed(2)
        block = verify_block or worker_of().verify_block
        torch.manual_seed(2)
        widths = widths_of(Scripted(cycle((2, block, 1))))
        worker = worker_of(looks_up=True, verify_block=verify_block, widths=widths)
        outcomes.append(texts_after(worker, steps, poison))
        for row, text in enumerate(outcomes[-1][0], 1):
            assert worker.lookup.texts[row, : len(text)].tolist() == text
    (_, blocks), (_, same) = outcomes
    assert all(map(torch.equal, blocks, same))
    assert {block.shape[1] for block in blocks} == ({2} if steps == 1 else {1, 2, block})


def distrust_the_draft(worker: Any) -> None:
    """Let the draft be wrong in a few steps without a match."""
    width = worker.verify_block
    known = RequestSlots(worker.req_to_token, torch.tensor([0]), torch.tensor([0]), 0)
    for _ in range(3):
        block, _ = worker.lookup.fill(*2 * [torch.full((1, 4), 20)], known, width)
        worker.lookup.learn(accept(block, torch.full((1, width), 9)))


@pytest.mark.parametrize("verify_block", [None, 12])
def test_drafts_are_looked_up_and_counted(verify_block: int | None) -> None:
    """The end of the first prompt stands in it before; the draft goes on as there."""
    worker = worker_of(looks_up=True, verify_block=verify_block)
    worker.lookup.texts[1, :9] = torch.tensor(PROMPTS[0])
    lengths = torch.tensor([9, 9])
    known = RequestSlots(worker.req_to_token, torch.tensor([1, 2]), lengths, 9)
    drafted = torch.tensor([[4, 20, 20, 20], [11, 20, 20, 20]])
    distrust_the_draft(worker)
    block, looks_up = worker.lookup.fill(drafted, drafted, known, worker.verify_block)
    assert looks_up.tolist() == [True, False]
    # The rest of the block is no draft.
    rest = worker.verify_block - 4
    assert block[0].tolist() == [4, *([5, 6, 3, 4] * 8)[: 3 + rest]]
    assert block[1].tolist() == [11, 20, 20, 20, *[0] * rest]
    worker.lookup.learn(accept(block, torch.tensor([[5, 6, 3, 9] + [9] * rest, [9] * (4 + rest)])))
    worker.drafter.counters.send()
    report = worker.figures.report()
    assert report["steps_by_source"] == {"draft": 4, "lookup": 1}
    assert report["accepted_drafts_by_source"] == {"draft": 0, "lookup": 3}


def test_ids_of_images_are_not_proposed() -> None:
    worker = worker_of(looks_up=True)
    text = [*PROMPTS[0][:5], 2**31 - 1, VOCAB, *PROMPTS[0][:4]]
    worker.lookup.texts[1, : len(text)] = torch.tensor(text)
    known = RequestSlots(
        worker.req_to_token, torch.tensor([1]), torch.tensor([len(text)]), len(text)
    )
    drafted = torch.tensor([[3, 20, 21, 22]])
    distrust_the_draft(worker)
    assert worker.lookup.fill(drafted, drafted, known, 4)[0].tolist() == [[3, 20, 21, 3]]


def test_a_prompt_in_pieces_and_decoding_requests_beside_it() -> None:
    """A chunk enters nothing but its last token, the last one all; a decoding request's newest
    token is known on the device only, and its text stays."""
    worker = worker_of(looks_up=True)
    worker.lookup.texts.fill_(1)
    running, new = requests(PROMPTS)
    running.output_ids = [21, 22]
    batch = prefill_of([13, 0], [14, 4])
    batch.reqs, batch.decoding_reqs = [running, new], [running]
    batch.forward_mode = ForwardMode.MIXED
    batch.input_ids = torch.tensor([30, *PROMPTS[1][:4]])
    batch.enable_overlap = True
    worker.forward_batch_generation(batch)
    assert worker.lookup.texts[1, 12:15].tolist() == [1, 30, 1]
    assert worker.lookup.texts[2, :5].tolist() == [1, 1, 1, PROMPTS[1][3], 1]
    rest = prefill_of([4], [9])
    rest.reqs, rest.req_pool_indices = [new], torch.tensor([2])
    new.origin_input_ids = [*PROMPTS[1][:8], 2**40]  # of an image
    worker.forward_batch_generation(rest)
    assert worker.lookup.texts[2, :10].tolist() == [*PROMPTS[1][:8], 2**31 - 1, 1]
