"""Rollback of the target's recurrent state to a partly accepted block: snapshots or replay.

Verification must not change a recurrent state, because only a prefix of the block is kept.
*Snapshots* (SGLang's way) keep the state after every block position and copy the accepted one.
*Replay* keeps only the layers' inputs, a hundredth of the size, and applies the accepted ones to
the state afterwards.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from sglang.srt.configs.hybrid_arch import hybrid_gdn_config, mambaish_config
from sglang.srt.mem_cache.allocation_sizing import get_alloc_page_size
from sglang.srt.runtime_context import (
    get_exec,
    get_schedule,
    mamba_checkpoint_grid,
    mamba_track_grid,
)
from sglang.srt.utils.common import ceil_align
from torch import Tensor

from sglang_dflash.common.errors import ConfigError
from sglang_dflash.drafting.recurrent import replay
from sglang_dflash.drafting.recurrent.replay import Moves, RecurrentLayers, VerifyInputs
from sglang_dflash.drafting.self_check import Fold, MoveWindows, check_replay
from sglang_dflash.patches.patch import install_late
from sglang_dflash.serving.patches import REPLAY_PATCHES


class Checkpoints(NamedTuple):
    """Prefix-cache checkpoints that a step passes.

    Attributes:
        slots: int64 `[R]`, state slots of the checkpoints.
        steps: int64 `[R]`, the block position after which one is due, -1 for none.
    """

    slots: Tensor
    steps: Tensor


class Rollback:
    """Rollback of the target's recurrent state to an accepted prefix. This class is SGLang's own
    way: its pool holds the state after every block position."""

    name = "snapshot"

    def __init__(self, model_runner: Any) -> None:
        self._runner = model_runner

    @property
    def scratch_bytes(self) -> int:
        """Bytes that the state pool holds for verification only, of all running requests. Counts
        memory, not shapes: its windows overlap.

        Those are snapshots of states, or with --enable-linear-replayssm-spec a ring of their
        inputs.
        """
        cache = self._runner.req_to_token_pool.mamba_pool.mamba_cache
        rings = [tensor for name, tensor in vars(cache).items() if name.startswith("replayssm_")]
        tensors = [cache.intermediate_ssm, *cache.intermediate_conv_window, *rings]
        memory = [tensor.untyped_storage() for tensor in tensors if tensor is not None]
        storages = {storage.data_ptr(): storage.nbytes() for storage in memory}
        return sum(storages.values())

    def warm_up(self) -> None:
        """Compile what `commit` launches. Called once, when the target's graphs are captured.
        SGLang warms its own kernels up."""

    def check(self) -> None:
        """Compare with torch what `commit` computes, if it is ours. Raises SelfCheckFailed."""

    def expect_new_weights(self) -> None:
        """Prepare for new weights of the target; call it before they are replaced. SGLang's own way
        reads the target's weights and needs no preparation."""

    def commit(self, lengths: Tensor, checkpoints: Checkpoints | None) -> None:
        """Move the states of the last verify forward's requests on by `lengths` int64 `[R]` (1 to
        the step's width) tokens."""
        self._runner.attn_backend.update_mamba_state_after_mtp_verify(
            last_correct_step_indices=lengths - 1,
            mamba_track_indices=None if checkpoints is None else checkpoints.slots,
            mamba_steps_to_track=None if checkpoints is None else checkpoints.steps,
            model=self._runner.model,
        )


class Replay(Rollback):
    """Folds the accepted tokens of a recorded verify forward into the states of all layers, by
    operations of `drafting/recurrent/replay.py` or others that compute the same."""

    name = "replay"

    def __init__(
        self,
        model_runner: Any,
        fold_: Fold = replay.fold_,
        move_windows_: MoveWindows = replay.move_windows_,
    ) -> None:
        super().__init__(model_runner)
        self._ops = fold_, move_windows_
        self._layers: RecurrentLayers | None = None
        self._weights_changed = False

    def expect_new_weights(self) -> None:
        self._weights_changed = True

    def layers(self) -> RecurrentLayers:
        """The weights of all recurrent layers, stacked. Their memory stays where it is."""
        recorded = self._runner.req_to_token_pool.mamba_pool.recording.layers
        if self._layers is None:
            self._layers = stacked_layers([recorded[i] for i in range(len(recorded))])
        elif self._weights_changed:
            self._layers.copy_(stacked_layers([recorded[i] for i in range(len(recorded))]))
        self._weights_changed = False
        return self._layers

    @property
    def scratch_bytes(self) -> int:
        recording = self._runner.req_to_token_pool.mamba_pool.recording
        return super().scratch_bytes + recording.nbytes

    def commit(self, lengths: Tensor, checkpoints: Checkpoints | None) -> None:
        backend = self._runner.attn_backend.linear_attn_backend
        slots = backend.forward_metadata.mamba_cache_indices[: len(lengths)].long()
        rows = torch.arange(len(lengths), device=lengths.device)
        moves = Moves(rows, slots, slots, lengths)
        if checkpoints is not None:
            # Only the device knows which are due. Reading it would make the host wait every step.
            due = (checkpoints.steps >= 0) & (checkpoints.slots >= 0)
            # A unified memory pool renumbers its state slots; other pools return them unchanged.
            to = backend._translate_mamba_indices(checkpoints.slots.clamp(min=0)).long()
            moves = moves._replace(checkpoints=to.where(due, -1), steps=checkpoints.steps + 1)
        self._move(moves)

    def _move(self, moves: Moves) -> None:
        pool = self._runner.req_to_token_pool.mamba_pool
        cache, recording = pool.mamba_cache, pool.recording
        # [L, R, verify_block, C, window - 1], the last inputs after every block position.
        windows = cache.intermediate_conv_window[0]
        verified = VerifyInputs(recording.windows, windows[..., -1], *recording.gates)
        fold_, move_windows_ = self._ops
        fold_(self.layers(), cache.temporal, verified, moves)
        move_windows_(cache.conv[0], windows, moves)

    def warm_up(self) -> None:
        """Compile the kernels of a commit, with and without checkpoints, if a verify forward has
        been recorded, as for the target's graphs. Moves nothing."""
        pool = self._runner.req_to_token_pool.mamba_pool
        if pool.recording.layers:
            nothing = torch.full((1,), -1, device=pool.mamba_cache.temporal.device)
            self._move(Moves(*[nothing] * 4))
            self._move(Moves(*[nothing] * 6))

    def check(self) -> None:
        if self._ops != (replay.fold_, replay.move_windows_):
            cache = self._runner.req_to_token_pool.mamba_pool.mamba_cache
            check_replay(*self._ops, cache.conv[0], cache.temporal)


def make_rollback(requested: str, model_runner: Any, verify_block: int) -> Rollback | None:
    """The rollback for this target, None if it has no recurrent layers. To be called before SGLang
    allocates its state pool.

    Raises:
        ConfigError: replay was requested and the recurrent layers are not Gated DeltaNet, or the
            checkpoints of the prefix cache are too close for such blocks.
    """
    layers = mambaish_config(model_runner.model_config)
    if layers is None:
        return None
    check_checkpoints(verify_block)
    can_replay = replays("auto", model_runner.model_config)
    if requested == "replay" and not can_replay:
        raise ConfigError(
            "recurrent_rollback",
            requested,
            f"it is for Gated DeltaNet layers, this target's are {type(layers).__name__}; give "
            "'snapshot' or leave it at 'auto'",
        )
    if not replays(requested, model_runner.model_config):
        return Rollback(model_runner)
    install_late(REPLAY_PATCHES, "replay of recurrent layers")
    if torch.device(model_runner.device).type != "cuda":
        return Replay(model_runner)
    from dflash_kernels import gated_delta_fold

    return Replay(model_runner, gated_delta_fold.fold_, gated_delta_fold.move_windows_)


def check_checkpoints(verify_block: int) -> None:
    """Raise ConfigError if a step and the one in flight can each pass a checkpoint: SGLang, which
    learns of the first one late, then takes the second one's state for it."""
    mamba, page_size, tokens = get_exec().mamba, get_alloc_page_size(), 2 * verify_block
    is_alternating = mamba.enable_mamba_extra_buffer and not mamba.enable_mamba_extra_buffer_lazy
    overlaps = not get_schedule().disable_overlap_schedule
    if is_alternating and overlaps and tokens > mamba_track_grid(page_size):
        least = ceil_align(tokens, mamba_checkpoint_grid(page_size))
        raise ConfigError(
            "--mamba-track-interval",
            mamba.mamba_track_interval,
            f"{least} or more is required for blocks of {verify_block} tokens: two steps that "
            "overlap may pass one checkpoint each, and prompts would go on from a state that is "
            "not theirs. With --mamba-radix-cache-strategy extra_buffer_lazy or "
            "--disable-overlap-schedule, less is enough",
        )


def replays(requested: str, model_config: Any) -> bool:
    """Return whether replay serves a target, by SGLang's config of it."""
    return requested != "snapshot" and hybrid_gdn_config(model_config) is not None


def stacked_layers(layers: list[Any]) -> RecurrentLayers:
    """Weights of SGLang's GDN layers, in the order of the state pool."""
    first = layers[0]
    biases = None if first.bias is None else torch.stack([layer.bias for layer in layers])
    return RecurrentLayers(
        conv_weight=torch.stack([layer.conv_weights for layer in layers]),
        conv_bias=biases,
        activation=first.activation,
        a_log=torch.stack([layer.A_log for layer in layers]),
        dt_bias=torch.stack([layer.dt_bias for layer in layers]),
        key_heads=first.num_k_heads,
        value_heads=first.num_v_heads,
        key_dim=first.head_k_dim,
        value_dim=first.head_v_dim,
    )
