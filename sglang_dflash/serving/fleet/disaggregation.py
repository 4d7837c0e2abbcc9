"""Prefill/decode disaggregation: a prompt's draft K/V goes from the server that computed it to the
one that answers.

Every draft KV cache then has an entry per target slot, so that its pages are the target's. SGLang
sends them as it sends what lies beside a target's K/V, for all pages of a prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sglang_dflash.drafting.groups import KVGroup


class DraftKVPages:
    """What SGLang takes for a draft's KV pool. It has no layers that lie like the target's:
    `add_draft_kv` registers the caches.

    Attributes:
        groups: with an entry per target slot each.
    """

    layer_num = 1

    def __init__(self, groups: Sequence[KVGroup]) -> None:
        self.groups = groups

    def get_contiguous_buf_infos(self) -> tuple[list[int], list[int], list[int]]:
        return [], [], []


def add_draft_kv(
    _result: None, kv_args: Any, target_pool: Any, draft_pool: Any = None, *_: Any, **__: Any
) -> None:
    """After `setup_state_kv_args`: the draft KV caches are transferred too, page by page."""
    if not isinstance(draft_pool, DraftKVPages):
        return
    from sglang.srt.disaggregation.base.conn import StateType
    from sglang.srt.disaggregation.utils import append_state_component

    caches = [group.cache.kv for group in draft_pool.groups]
    append_state_component(
        kv_args,
        # Of SGLang's kinds the one whose pages are those of the whole prompt.
        StateType.BLOCK_SCALE,
        [kv.data_ptr() for kv in caches],
        [kv.nbytes for kv in caches],
        [kv[0].nbytes * target_pool.page_size for kv in caches],
        # Without ids SGLang takes the first half of the list for K, the other for V.
        layer_ids=list(range(len(caches))),
    )


def take_over(batch: Any, scheduler: Any, *_: Any) -> Any:
    """After `get_new_prebuilt_batch`: our worker learns of requests that another server has
    prefilled."""
    worker = getattr(scheduler.draft_worker, "dflash", None)
    if batch is not None and worker is not None:
        worker.take_over(batch)
    return batch
