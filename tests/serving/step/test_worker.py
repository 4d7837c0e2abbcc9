"""Prefill and decode steps of our worker, without a server."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sglang.srt.layers.logits_processor import SamplingMaskOutput
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from torch import Tensor

from sglang_dflash.drafting.acceptance import accept
from sglang_dflash.serving.step import batch as our_batch
from sglang_dflash.serving.step.batch import CaptureHiddenMode
from tests.serving.batches import sampling_info
from tests.serving.in_process import (
    COLUMNS,
    ROWS,
    decode_of,
    draft_kv,
    filled,
    prefill_of,
    worker_of,
)

LENGTHS = [9, 14]


def slots_of(lengths: list[int]) -> Tensor:
    table = torch.arange(ROWS * COLUMNS).view(ROWS, COLUMNS) + 1
    return torch.cat([table[row, :n] for row, n in enumerate(lengths, 1)])


@pytest.mark.parametrize("window", [None, 7])
def test_a_prompts_slots_are_known_before_the_forward(window: int | None) -> None:
    """SGLang may change the table as soon as the target's forward has read it."""
    written = []
    for changed in (False, True):
        torch.manual_seed(1)
        worker = worker_of(window)
        if changed:
            table = worker.req_to_token
            worker.target_worker.on_launch = lambda table=table: table.fill_(99)
        worker.forward_batch_generation(prefill_of([0, 0], LENGTHS))
        written.append(draft_kv(worker, slots_of(LENGTHS)))
    assert written[0].isfinite().any()
    assert written[0].nan_to_num(-1).equal(written[1].nan_to_num(-1))


@pytest.mark.parametrize("window", [None, 7])
def test_rows_of_padding_are_no_tokens(window: int | None) -> None:
    """Behind the hidden states of a prefill, and of a verify forward."""
    worker = filled(worker_of(window, padding=3), LENGTHS)
    result = worker.forward_batch_generation(decode_of(LENGTHS))
    assert worker.drafter.groups[0].cache.kv.isfinite().all()
    assert result.logits_output.hidden_states is None
    committed = result.new_seq_lens.tolist()
    newest = torch.cat([slots_of([0, n])[-1:] if row else slots_of([n])[-1:]
                        for row, n in enumerate(committed)])  # fmt: skip
    assert draft_kv(worker, newest).isfinite().all()


@pytest.mark.parametrize("window", [None, 7])
def test_more_may_be_reserved_than_the_table_has_columns(window: int | None) -> None:
    """Lengths that only the device knows: the host's bound on them is what SGLang has reserved."""
    lengths = [COLUMNS - 4, 9]
    results = []
    for on_host in (True, False):
        torch.manual_seed(1)
        batch = decode_of(lengths)
        if not on_host:
            batch.seq_lens_cpu = batch.seq_lens_sum = None
            reserved = torch.tensor([COLUMNS + 8, 24])
            batch.spec_info.nxt_kv_lens_cpu, batch.spec_info.nxt_kv_lens_sum = reserved, 56
        worker = filled(worker_of(window), lengths)
        results.append(worker.forward_batch_generation(batch))
    assert results[0].next_token_ids.equal(results[1].next_token_ids)
    assert results[0].new_seq_lens.equal(results[1].new_seq_lens)


def test_what_the_target_returns_is_handed_on() -> None:
    """Routed experts, indexer top-k, and whatever SGLang adds."""
    worker = filled(worker_of(), LENGTHS)
    extra = {"routed_experts_output": object(), "indexer_topk_output": object()}
    worker.target_worker.extra = extra | {"can_run_cuda_graph": True}
    result = worker.forward_batch_generation(decode_of(LENGTHS))
    assert all(getattr(result, name) is value for name, value in extra.items())
    assert result.can_run_cuda_graph and result.accept_lens.tolist() != []


class Sampler:
    """Notes which memory it is given, and turns logits into probabilities in place."""

    def __init__(self) -> None:
        self.given: list[int] = []

    def __call__(self, output: Any, *_: Any) -> Tensor:
        logits = output.next_token_logits
        self.given.append(logits.data_ptr())
        tokens = logits.argmax(-1)
        logits.copy_(logits.softmax(-1))
        return tokens.int()

    def _sync_token_ids_across_tp(self, *_: Any) -> None:
        pass


class MaskingSampler(Sampler):
    """Gives the row of a token as the one that it was drawn from."""

    def __call__(self, output: Any, info: Any, *rest: Any) -> Tensor:
        rows = info.sampling_mask_batch_indices
        one = torch.ones(len(rows))
        output.sampling_mask_output = SamplingMaskOutput(rows[:, None], one, one, None, one)
        return super().__call__(output, info, *rest)


@pytest.mark.parametrize("greedy", [True, False])
def test_the_sampling_masks_of_a_step_are_handed_on(greedy: bool) -> None:
    """They hold every position of the requests that ask, and the number of committed ones."""
    worker = filled(worker_of(sampler=MaskingSampler()), LENGTHS)
    info = sampling_info(sampling_mask_batch_indices=torch.tensor([1]), is_all_greedy=greedy)
    result = worker.forward_batch_generation(decode_of(LENGTHS, sampling_info=info))
    mask = result.logits_output.sampling_mask_output
    block = worker.verify_block
    assert mask.token_ids.tolist() == [[[block + i] for i in range(block)]]
    assert mask.lengths.shape == mask.selected_logprobs.shape == mask.statuses.shape == (1, block)
    assert mask.num_accept_tokens.tolist() == result.accept_lens[1:].tolist()


@pytest.mark.parametrize("mode", [CaptureHiddenMode.FULL, CaptureHiddenMode.LAST])
def test_the_last_layers_hidden_states_are_handed_on(
    mode: CaptureHiddenMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that asks gets them, in place of those that the drafter reads."""
    monkeypatch.setattr(our_batch, "get_server_return_hidden_states_mode", lambda: mode)
    worker = worker_of()
    for asked in (False, True):
        for batch in (prefill_of([0, 2], LENGTHS), decode_of(LENGTHS)):
            batch.return_hidden_states = asked
            output = worker.forward_batch_generation(batch).logits_output
            last = worker.target_worker.last
            rows = last.clone()
            if mode.is_last() and batch.forward_mode == ForwardMode.EXTEND:
                rows = rows[[LENGTHS[0] - 1, sum(LENGTHS) - 3]]
            # A captured forward writes there again, while these are copied to the host.
            last.fill_(9)
            assert output.hidden_states.equal(rows) if asked else output.hidden_states is None
            assert output.last_hidden_states is None


def test_tokens_without_a_slot_are_not_committed() -> None:
    """Near the end of the pool: they are computed in the padding slot, and the last slot but one
    is the last that a draft may take."""
    for left in range(1, 8):
        worker = filled(worker_of(), LENGTHS)
        steps: list[Any] = []
        worker.observer.before_step = lambda _batch, step, steps=steps: steps.append(step)
        # The target agrees with every draft that it is shown.
        worker.accept = lambda block, _: accept(block, block.clamp(min=0).roll(-1, 1))
        batch = decode_of(LENGTHS)
        batch.spec_info.ends = torch.tensor([LENGTHS[0] + left, 1000])
        result = worker.forward_batch_generation(batch)
        block = worker.verify_block
        assert (steps[0].slots[0] != 0).tolist() == [i < left for i in range(block)]
        assert (steps[0].slots[1] != 0).all()
        assert result.accept_lens.tolist() == [min(max(1, left - 1), block), block]


@pytest.mark.parametrize("return_logprob", [False, True])
def test_logits_are_copied_only_for_log_probabilities(
    return_logprob: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang_dflash.serving.step import sampling

    seen: list[Tensor] = []
    monkeypatch.setattr(
        sampling,
        "compute_spec_logprobs",
        lambda _batch, output, *_, **__: seen.append(output.next_token_logits.clone()),
    )
    sampler = Sampler()
    worker = filled(worker_of(sampler=sampler), LENGTHS)
    worker.forward_batch_generation(
        decode_of(LENGTHS, sampling_info=sampling_info(), return_logprob=return_logprob)
    )
    logits = worker.target_worker.output.next_token_logits
    assert (sampler.given == [logits.data_ptr()]) is not return_logprob
    if return_logprob:
        assert not seen[0].sum(-1).allclose(torch.ones(len(seen[0])))


class FirstRank:
    """A group of two in which this rank is the second; the first one's tensors are known."""

    world_size, rank_in_group = 2, 1

    def __init__(self) -> None:
        self.firsts: list[Tensor] = []
        self.replaced: list[Tensor] = []

    def broadcast(self, values: Tensor, src: int) -> None:
        assert src == 0
        self.replaced.append(values.clone())
        values.copy_(self.firsts.pop(0).view_as(values))


def test_every_choice_is_the_first_ranks() -> None:
    """Its first tokens, its drafts, and its tokens after verify: one differing argmax would part
    the ranks for good."""
    group, rows = FirstRank(), len(LENGTHS)
    worker = worker_of(group=group)
    group.firsts = [torch.tensor([3, 4])]
    result = worker.forward_batch_generation(prefill_of([0, 0], LENGTHS))
    assert result.next_token_ids.tolist() == [3, 4]
    assert result.next_draft_input.bonus_tokens.tolist() == [3, 4]
    block = torch.tensor([[5, 1, 2, 3], [5, 4, 5, 6]])
    group.firsts = [block, torch.tensor([[1, 2, 9, 9], [0, 1, 2, 3]])]
    result = worker.forward_batch_generation(decode_of(LENGTHS))
    assert not group.firsts and len(group.replaced) == 3
    assert result.accept_lens.tolist() == [3, 1]
    assert result.next_token_ids.view(rows, -1)[0, :3].tolist() == [1, 2, 9]
    assert result.next_draft_input.bonus_tokens.tolist() == [9, 0]


def test_a_site_that_is_switched_off_is_not_synchronized(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_SPEC_TP_SYNC", "off")
    group = FirstRank()
    worker = filled(worker_of(group=group), LENGTHS)
    worker.forward_batch_generation(decode_of(LENGTHS))
    assert not group.replaced
