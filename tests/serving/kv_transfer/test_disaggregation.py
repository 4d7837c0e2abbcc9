"""Prefill/decode disaggregation without servers: what is registered, and what is taken over."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from sglang_dflash.checkpoint.draft_config import Reach
from sglang_dflash.serving.kv_transfer import disaggregation
from sglang_dflash.serving.step.batch import DraftInput
from tests.patches.originals import original
from tests.serving.batches import batch_of, request_of
from tests.serving.in_process import COLUMNS, draft_kv, filled, prefill_of, worker_of

PAGE = 4


def registered(draft_pool: Any) -> Any:
    """Return what SGLang and our row register for a target pool with pages of `PAGE`."""
    arguments: Any = SimpleNamespace(), SimpleNamespace(page_size=PAGE), draft_pool, 6
    original("sglang.srt.disaggregation.utils.setup_state_kv_args")(*arguments)
    assert arguments[0].state_types == []
    disaggregation.add_draft_kv(None, *arguments)
    return arguments[0]


def test_the_draft_kv_is_registered() -> None:
    """A page of the target's is the same page of the draft KV cache."""
    worker = filled(worker_of(window=None), [10, 7])
    pool = disaggregation.DraftKVPages(worker.drafter.groups)
    (cache,) = [group.cache for group in pool.groups]
    of = registered(pool)
    assert [kind.value for kind in of.state_types] == ["block_scale"]
    assert [*of.state_layer_ids] == [[0]] and of.state_data_lens == [[cache.kv.nbytes]]
    ((start,),), ((item,),) = of.state_data_ptrs, of.state_item_lens
    slots = torch.arange(7 * PAGE, 8 * PAGE)
    page = ctypes.string_at(start + 7 * item, item)
    assert page == draft_kv(worker, slots).numpy().tobytes() and any(page)
    # Beside SGLang's own: it has no pages of a draft there.
    assert pool.get_contiguous_buf_infos() == ([], [], [])


def test_both_sides_name_the_same_pages() -> None:
    """Each for its own slots; states of the target are left as they are. Of a last page with one
    token, the window begins at the end of the third last one."""
    caches = [SimpleNamespace(kv=torch.zeros(9, 2, heads)) for heads in (1, 3)]
    groups: Any = [
        SimpleNamespace(reach=reach, cache=cache)
        for reach, cache in zip((Reach(6), Reach()), caches, strict=True)
    ]
    pages = disaggregation.DraftKVPages(groups)
    sent: list[Any] = []
    queue = SimpleNamespace(
        draft_token_to_kv_pool=pages, token_to_kv_pool=SimpleNamespace(page_size=PAGE)
    )
    sender = SimpleNamespace(send=lambda *given, **more: sent.append((given, more)))
    request = request_of(disagg_kv_sender=sender)
    disaggregation.send_visible(None, queue, request)
    there, here = np.arange(10, 20), np.arange(60, 70)
    # A part of the prompt, then the last one.
    request.disagg_kv_sender.send(there[:5], None, num_kv_tokens=20)
    request.disagg_kv_sender.send(there[5:], [[7], there, there], num_kv_tokens=20)
    states: Any = [[7], here, here]
    disaggregation.receive_visible(queue, None, here, PAGE, states, decode_prefix_len=0)
    assert [given[1] for given, _ in sent] == [None, [[7], [17, 18, 19], [*there]]]
    assert states == [[7], [67, 68, 69], [*here]]
    assert all(more == {"num_kv_tokens": 20} for _, more in sent)
    # Counted where they arrive, once: 3 pages of 8 bytes per token, 10 of 24.
    assert pages.received_bytes == PAGE * (3 * 8 + 10 * 24)


def transferred(prompt: list[int], first: int, seed: int) -> Any:
    """The decode server's batch of a request in row 1, as SGLang makes it."""
    batch = prefill_of([2], [len(prompt)])
    batch.enable_overlap = True
    batch.reqs = [request_of(prompt=prompt, output=[first], sampling_seed=seed)]
    make = original("sglang.srt.speculative.dflash_disaggregation.build_dflash_disagg_draft_input")
    future_map = SimpleNamespace(publish=lambda *_: None, stash=lambda *_: None)
    batch.spec_info = make(batch, torch.tensor([first]), future_map)
    return batch


def test_a_request_is_taken_over() -> None:
    worker, prompt = worker_of(looks_up=True), [3, 4, 5, 6, 3, 4]
    worker.lookup.texts.fill_(9)
    batch = transferred(prompt, first=8, seed=77)
    assert not isinstance(batch.spec_info, DraftInput)
    scheduler = SimpleNamespace(draft_worker=SimpleNamespace(dflash=worker))
    assert disaggregation.take_over(batch, scheduler) is batch
    made = batch.spec_info
    assert isinstance(made, DraftInput) and made.in_flight == 0
    assert made.bonus_tokens.tolist() == [8] and made.new_seq_lens.tolist() == [len(prompt)]
    assert made.future_indices.tolist() == [1]
    # The bonus token enters with its step.
    assert worker.lookup.texts[1, : len(prompt) + 1].tolist() == [*prompt, 9]
    assert len(worker.lookup.texts[1]) == COLUMNS
    assert worker.seeds._by_row.tolist() == [0, 77, 0]


@pytest.mark.parametrize("theirs", [None, object()])
def test_other_workers_are_left_to_sglang(theirs: Any) -> None:
    """Nothing of them is registered, sent, received or taken over by us."""
    assert registered(theirs).state_types == []
    queue, states = SimpleNamespace(draft_token_to_kv_pool=theirs), [[1, 2, 3]]
    sender, batch = SimpleNamespace(send=None), batch_of(spec_info="theirs")
    disaggregation.send_visible(None, queue, request_of(disagg_kv_sender=sender))
    disaggregation.receive_visible(queue, None, None, PAGE, states)
    disaggregation.take_over(batch, SimpleNamespace(draft_worker=theirs))
    assert (sender.send, states, batch.spec_info) == (None, [[1, 2, 3]], "theirs")


def test_no_request_has_arrived() -> None:
    scheduler = SimpleNamespace(draft_worker=SimpleNamespace(dflash=None))
    assert disaggregation.take_over(None, scheduler) is None
