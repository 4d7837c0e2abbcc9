"""Seeds of the random numbers that a sampled request's tokens are drawn with."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from typing import Any

import torch
from torch import Tensor

from sglang_dflash.patches.restored import restored
from sglang_dflash.serving.step.batch import ScheduleBatch, to_device


class Seeds:
    """The seed of every running request, which SGLang's sampler is given.

    Under --enable-deterministic-inference it is SGLang's: the request's own, or 42. Otherwise
    SGLang hands its sampler no seed, and it is the request's own, or one drawn for it.

    Attributes:
        secret: a random number of the server, the same on all tensor-parallel ranks.
    """

    def __init__(self, rows: int, secret: int, device: torch.device) -> None:
        """`rows`: of SGLang's request-to-token table."""
        self.secret = secret
        self._by_row = torch.zeros(rows, dtype=torch.int64, device=device)
        # Prefills so far: the same number on all tensor-parallel ranks.
        self._prefills = 0

    @contextmanager
    def given(self, batch: ScheduleBatch) -> Iterator[None]:
        """Have the batch's sampling parameters carry the seeds, for one step."""
        info = batch.sampling_info
        if info is None or info.is_all_greedy or info.sampling_seed is not None:
            yield
            return
        rows = batch.req_pool_indices.long()
        if batch.forward_mode.is_extend():
            self.note(batch)
        with restored(batch, "sampling_info"):
            # SGLang merges and filters its own one.
            batch.sampling_info = copy(info)
            batch.sampling_info.sampling_seed = self._by_row[rows]
            yield

    def note(self, batch: ScheduleBatch) -> None:
        """Note the seeds of requests that are new here, or go on after another prefill."""
        self._prefills += 1
        drawn = torch.tensor([self.of(request) for request in batch.reqs])
        rows = batch.req_pool_indices.long()
        self._by_row[rows] = to_device(drawn, rows.device)

    def has_own(self, batch: ScheduleBatch) -> Tensor | None:
        """Return which requests ask for their seed, bool `[R]`; None if none does."""
        flags = [_asks_for_seed(request) for request in batch.reqs]
        return to_device(torch.tensor(flags), batch.seq_lens.device) if any(flags) else None

    def of(self, request: Any) -> int:
        """A request's seed: its own, or one that is drawn anew with every prefill. No later one
        may have it again: a client may give the same id (`rid`) to one request after another.

        Of several answers to one prompt (`n`) each has its own, whatever the request asks for:
        they would all be the same.
        """
        if _asks_for_seed(request):
            return request.sampling_params.sampling_seed
        drawn_from = f"{self.secret}/{self._prefills}/{request.rid}"
        drawn = hashlib.blake2b(drawn_from.encode(), digest_size=8).digest()
        return int.from_bytes(drawn, "little", signed=True)


def _asks_for_seed(request: Any) -> bool:
    params = request.sampling_params
    return params.sampling_seed is not None and params.n == 1
