"""Prefill/decode disaggregation: a prompt's draft K/V goes from the server that computed it to the
one that answers.

Every draft KV cache then has an entry per target slot, so that its pages are the target's. SGLang
sends them as it sends what lies beside a target's K/V; here the pages that no draft can see are
left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sglang_dflash.drafting.groups import KVGroup


class DraftKVPages:
    """The draft's KV pool as SGLang sees it. Its layers do not lie like the target's:
    `add_draft_kv` registers the caches.

    Attributes:
        groups: of draft layers, with caches of an entry per target slot.
        received_bytes: bytes of draft K/V in the pages requested from prefill servers.
    """

    layer_num = 1

    def __init__(self, groups: Sequence[KVGroup]) -> None:
        self.groups = groups
        self.received_bytes = 0

    def get_contiguous_buf_infos(self) -> tuple[list[int], list[int], list[int]]:
        return [], [], []

    def keep_visible(self, states: list[Any] | None, page_size: int) -> int:
        """Leave each cache only the pages of a prompt that its layers can see.

        Args:
            states: pages of every state that goes with the prompt, the caches' last; None if they
                go with a later part of it.

        Returns:
            Bytes of the pages that are left.
        """
        if states is None:
            return 0
        left_bytes = 0
        for at, group in enumerate(self.groups, len(states) - len(self.groups)):
            parts = group.reach.parts(len(states[at]), page_size)
            states[at] = [page for part in parts for page in states[at][part]]
            left_bytes += len(states[at]) * page_size * group.cache.kv[0].nbytes
        return left_bytes


def add_draft_kv(
    _result: None, kv_args: Any, target_pool: Any, draft_pool: Any = None, *_: Any, **__: Any
) -> None:
    """After `setup_state_kv_args`: the draft KV caches are states of their own."""
    if not isinstance(draft_pool, DraftKVPages):
        return
    from sglang.srt.disaggregation.base.conn import StateType
    from sglang.srt.disaggregation.utils import append_state_component

    for group in draft_pool.groups:
        kv = group.cache.kv
        append_state_component(
            kv_args,
            # Of SGLang's kinds the one whose pages are those of the whole prompt.
            StateType.BLOCK_SCALE,
            [kv.data_ptr()],
            [kv.nbytes],
            [kv[0].nbytes * target_pool.page_size],
            # Without ids SGLang takes the first half of a list for K, the other for V.
            layer_ids=[0],
        )


def send_visible(_result: None, queue: Any, request: Any) -> None:
    """After `PrefillBootstrapQueue._process_req`: the request's sender leaves pages out."""
    pages, sender = queue.draft_token_to_kv_pool, request.disagg_kv_sender
    if not isinstance(pages, DraftKVPages):
        return
    send, page_size = sender.send, queue.token_to_kv_pool.page_size

    def send_some(kv_pages: Any, states: Any = None, **kwargs: Any) -> None:
        pages.keep_visible(states, page_size)
        send(kv_pages, states, **kwargs)

    sender.send = send_some


def receive_visible(
    queue: Any, _request: Any, _slots: Any, _size: int, states: Any = None, **_: Any
) -> None:
    """Before `DecodePreallocQueue._send_kv_metadata`: the pages that the sender leaves out."""
    pages = queue.draft_token_to_kv_pool
    if isinstance(pages, DraftKVPages):
        pages.received_bytes += pages.keep_visible(states, queue.token_to_kv_pool.page_size)


def take_over(batch: Any, scheduler: Any, *_: Any) -> Any:
    """After `get_new_prebuilt_batch`: our worker learns of requests that another server has
    prefilled."""
    worker = getattr(scheduler.draft_worker, "dflash", None)
    if batch is not None and worker is not None:
        worker.take_over(batch)
    return batch
