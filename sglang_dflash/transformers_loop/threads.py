"""How many threads torch uses for a model on the CPU."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

# A matrix product of a few megabytes takes as long as handing parts of it to another thread. Worse,
# every product ends at a barrier: if another program holds one of the cores, all threads wait there
# until the operating system gives that core back, milliseconds later, hundreds of times per step.
# A forward of 8 tokens on 2 cores that ten processes share: through 10 MiB of weights 44 ms with
# one thread and 3.1 s with two; 13 ms and 34 ms if waiting threads sleep (see `cli/generate.py`).
# Through 456 MiB 0.69 s and 7.8 s; sleeping 0.43 s and 0.39 s.
BYTES_PER_THREAD = 128 << 20
# Whoever sets one of these has chosen.
_CHOSEN_BY = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


def fitting_threads(weight_bytes: int) -> int:
    """Threads for a model of that size: one per `BYTES_PER_THREAD`, at most torch's number now."""
    return max(1, min(torch.get_num_threads(), weight_bytes // BYTES_PER_THREAD))


@contextmanager
def threads_for(*models: Any) -> Iterator[None]:
    """In this context torch uses no more threads than the weights of `models` need.

    It never uses more than before, so `torch.set_num_threads` stays an upper bound. Nothing changes
    if OMP_NUM_THREADS or MKL_NUM_THREADS is set. The number is one of the whole process: for
    programs that run one generation at a time.
    """
    before = torch.get_num_threads()
    if not any(name in os.environ for name in _CHOSEN_BY):
        weights = {p for model in models for p in model.parameters() if p.device.type == "cpu"}
        torch.set_num_threads(fitting_threads(sum(p.nbytes for p in weights)))
    try:
        yield
    finally:
        torch.set_num_threads(before)
