"""Moves of recurrent states between slots: commit after verify, prefix-cache checkpoints."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def scatter_mamba_states_after_mtp_verify(
    mamba_caches: Any,
    state_indices_tensor: Tensor,
    last_correct_step_indices: Tensor,
    mamba_track_indices: Tensor | None,
    mamba_steps_to_track: Tensor | None,
    src_indices_raw: Tensor | None = None,
) -> None:
    """Commit after verify, for all layers.

    The snapshot after a request's last accepted token becomes its state. The snapshot at a track
    boundary that it crossed becomes a prefix-cache checkpoint. A step or slot below zero is
    skipped. Steps index the snapshots `[layers, rows, block, ...]`; states are
    `[layers, slots, ...]`.

    Raises:
        ValueError: checkpoint slots without their steps.
    """
    pairs = [(mamba_caches.temporal, mamba_caches.intermediate_ssm)]
    pairs += zip(mamba_caches.conv, mamba_caches.intermediate_conv_window, strict=True)
    targets = [(state_indices_tensor, last_correct_step_indices)]
    if mamba_track_indices is not None:
        if mamba_steps_to_track is None:
            raise ValueError("mamba_track_indices needs mamba_steps_to_track")
        targets.append((mamba_track_indices, mamba_steps_to_track))
    for slots, steps in targets:
        source = torch.arange(len(steps)) if src_indices_raw is None else src_indices_raw.long()
        moved = (steps >= 0) & (slots >= 0)
        source, slots, steps = source[moved], slots[moved].long(), steps[moved].long()
        for states, snapshots in pairs:
            if states.numel():
                states[:, slots] = snapshots[:, source, steps]


def track_mamba_states_if_needed(
    conv_states: Tensor,
    ssm_states: Tensor,
    cache_indices: Tensor,
    mamba_track_mask: Tensor,
    mamba_track_indices: Tensor,
    batch_size: int,
    check_freed_slots: bool = False,
) -> None:
    """Decode at a track boundary: copy the masked rows' states to their checkpoint slots.

    Both pools are those of one layer, `[slots, ...]`.
    """
    track_mamba_states_all_layers(
        conv_states[None],
        ssm_states[None],
        cache_indices,
        mamba_track_mask,
        mamba_track_indices,
        batch_size,
        check_freed_slots,
    )


def track_mamba_states_all_layers(
    conv_states_pool: Tensor,
    ssm_states_pool: Tensor,
    cache_indices: Tensor,
    mamba_track_mask: Tensor,
    mamba_track_indices: Tensor,
    batch_size: int,
    check_freed_slots: bool = False,
) -> None:
    """`track_mamba_states_if_needed` for all layers. Both pools are `[layers, slots, ...]`."""
    source, target = cache_indices[:batch_size].long(), mamba_track_indices[:batch_size].long()
    copied = mamba_track_mask[:batch_size].bool() & (source >= 0) & (target >= 0)
    if copied.any():
        for pool in (conv_states_pool, ssm_states_pool):
            pool[:, target[copied]] = pool[:, source[copied]]
