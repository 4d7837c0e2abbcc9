"""Recurrent states on show: written to files after a decode step, for tests to compare."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import torch


def show_states(folder: Path, batch: Any, lengths: torch.Tensor, model_runner: Any) -> None:
    """Write every request's state, or the first rank's part of it.

    One file per prompt and committed length `[R]`: temporal `[L, HV, K, V]`, conv `[L, C, W - 1]`.
    """
    pool = model_runner.req_to_token_pool
    slots = pool.get_mamba_indices(batch.req_pool_indices.long()).long()
    cache = pool.mamba_pool.mamba_cache
    for request, slot, length in zip(batch.reqs, slots.tolist(), lengths.tolist(), strict=True):
        states = {
            "temporal": cache.temporal[:, slot].clone(),
            "conv": cache.conv[0][:, slot].clone(),
        }
        prompt = zlib.crc32(str(list(request.origin_input_ids)).encode())
        torch.save(states, folder / f"{prompt}-{length}.pt")
