"""Request features that SGLang gets wrong or silently leaves out: fixed, refused, or warned of."""

from __future__ import annotations

import logging
from typing import Any

from sglang_dflash.serving.step.batch import serves_dflash

logger = logging.getLogger(__name__)


def refuse_hidden_states(original: Any, request: Any, enable_overlap: bool) -> str | None:
    """Around `validate_dflash_request`: refuse `return_hidden_states` without overlap too."""
    del enable_overlap
    return original(request, True)


def without_last_token(kept: bool, sessions: Any, request: Any) -> bool:
    """After a turn of a streaming session: do not count its last token's KV as computed.

    That token may be the target's own after the accepted drafts, which no forward has read. The
    next turn then computes it.
    """
    if kept and serves_dflash():
        kv = sessions.slots[request.session.session_id].kv
        computed = len(request.origin_input_ids) + max(len(request.output_ids) - 1, 0)
        kv.kv_committed_len = min(kv.kv_committed_len, computed)
    return kept


class IgnoredSeeds:
    """Warns once, at the first sampled request whose seed SGLang drops.

    SGLang hands seeds to its sampler only under --enable-deterministic-inference
    (`SamplingBatchInfo.from_schedule_batch`), with and without speculation.

    Attributes:
        found: whether there was such a request.
    """

    def __init__(self) -> None:
        self.found = False

    def warn_once(self, batch: Any) -> None:
        """`batch`: a ScheduleBatch of new requests."""
        info = batch.sampling_info
        if self.found or info is None or info.sampling_seed is not None:
            return
        for request in batch.reqs:
            seed, is_greedy = (
                request.sampling_params.sampling_seed,
                request.sampling_params.top_k == 1,
            )
            if seed is not None and not is_greedy:
                self.found = True
                logger.warning(
                    "DFLASH: a request has the seed %d, which SGLang ignores: its samples cannot "
                    "be repeated, and are not those of a run without speculation. Start the server "
                    "with --enable-deterministic-inference. Further requests get no warning.",
                    seed,
                )
                return
