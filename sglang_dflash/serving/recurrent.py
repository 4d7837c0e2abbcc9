"""Commit of recurrent (GDN) state after verify: SGLang's snapshots, or replay of the accepted tokens.

Verify must leave a recurrent state as it is, because only a prefix of the block will stay. *Snapshots* (SGLang's way): the state
after every block position is kept and the accepted one copied. *Replay*: only the inputs are kept, a thousandth of the size, and the
accepted ones are folded into the state afterwards.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from sglang_dflash.checkpoint.errors import ConfigError
from sglang_dflash.core.recurrent.replay import RecurrentLayers, VerifyInputs, fold_
from sglang_dflash.serving import compat

logger = logging.getLogger(__name__)


# See core.recurrent.replay.fold_.
Fold = Callable[[RecurrentLayers, Tensor, VerifyInputs, Tensor, Tensor, Tensor, Tensor], None]


class Checkpoints(NamedTuple):
    """Prefix-cache checkpoints on the way: state slots int64 `[R]`, and the block position after which each is due, -1 for none."""

    slots: Tensor
    steps: Tensor


class Rollback(Protocol):
    """How the target's recurrent state follows an accepted prefix."""

    name: str

    @property
    def scratch_bytes(self) -> int:
        """Memory that verification needs beside the states themselves, of all running requests."""

    def commit(self, lengths: Tensor, checkpoints: Checkpoints | None) -> None:
        """Bring the states of the last verify forward's requests to where `lengths` int64 `[R]` (1 to B) of its tokens are in."""


def checkpoints_due(
    batch: compat.ScheduleBatch, seq_lens: Tensor, lengths: Tensor
) -> Checkpoints | None:
    """Which track boundaries this step crosses; `seq_lens` before it. None where the prefix cache keeps no checkpoints."""
    if batch.mamba_track_indices is None:
        return None
    grid = compat.checkpoint_grid(batch)
    after = seq_lens + lengths
    crossed = seq_lens // grid != after // grid
    return Checkpoints(
        batch.mamba_track_indices.long(),
        torch.where(crossed, after // grid * grid - seq_lens - 1, -1),
    )


class Snapshots:
    """SGLang's own contract: its pool holds the state after every block position."""

    name = "snapshot"

    def __init__(self, model_runner: Any) -> None:
        self._runner = model_runner

    @property
    def scratch_bytes(self) -> int:
        return compat.verify_scratch_bytes(self._runner)

    def commit(self, lengths: Tensor, checkpoints: Checkpoints | None) -> None:
        self._runner.attn_backend.update_mamba_state_after_mtp_verify(
            last_correct_step_indices=lengths - 1,
            mamba_track_indices=None if checkpoints is None else checkpoints.slots,
            mamba_steps_to_track=None if checkpoints is None else checkpoints.steps,
            model=self._runner.model,
        )


class Replay:
    """Keeps the gates' inputs of a verify forward; the convolution's are in SGLang's own windows. Then folds, all layers at once."""

    name = "replay"

    def __init__(self, model_runner: Any, block_size: int, fold_: Fold) -> None:
        self._runner, self._block_size, self._fold = model_runner, block_size, fold_
        self._layers: dict[int, Any] = {}
        # Of every layer and request: a and b [2, L, R, B, HV], and the convolution's window before the block [L, R, C, W - 1].
        self._gates = self._windows = torch.empty(0)

    @property
    def scratch_bytes(self) -> int:
        return compat.verify_scratch_bytes(self._runner) + self._gates.nbytes + self._windows.nbytes

    def record(self, layer: Any, a: Tensor, b: Tensor) -> None:
        """Before a layer verifies: its gates' inputs `[R * B, HV]`, and its convolution's window, which SGLang's kernel overwrites."""
        pool = self._runner.req_to_token_pool
        at, gates = (
            pool.mamba2_layer_index(layer.layer_id),
            torch.stack((a, b)).unflatten(1, (-1, self._block_size)),
        )
        conv, count = pool.mamba_pool.mamba_cache.conv[0], gates.shape[1]
        if not self._layers:
            depth, rows = len(conv), pool.size + 1
            self._gates, self._windows = (
                gates.new_zeros(2, depth, rows, *gates.shape[2:]),
                conv.new_zeros(depth, rows, *conv.shape[2:]),
            )
        self._layers[at] = layer
        # Copies: a captured graph reuses the memory of its tensors.
        self._gates[:, at, :count] = gates
        self._windows[at, :count] = conv[at, compat.recurrent_slots(self._runner)[:count].long()]

    def commit(self, lengths: Tensor, checkpoints: Checkpoints | None) -> None:
        slots = compat.recurrent_slots(self._runner)[: len(lengths)].long()
        rows = torch.arange(len(lengths), device=lengths.device)
        # Stacked anew every time, for a running server's weights may be replaced.
        layers = compat.recurrent_layers([self._layers[i] for i in range(len(self._layers))])
        if checkpoints is not None:
            # Which are due is known on the device alone: asking would make the host wait for it at every step.
            due = (checkpoints.steps >= 0) & (checkpoints.slots >= 0)
            to = compat.physical_state_slots(self._runner, checkpoints.slots.clamp(min=0))
            self._write(layers, rows, slots, to.where(due, -1), checkpoints.steps + 1)
        self._write(layers, rows, slots, slots, lengths)

    def _write(
        self, layers: RecurrentLayers, rows: Tensor, source: Tensor, target: Tensor, lengths: Tensor
    ) -> None:
        """Into slots `target` of every layer's pool, unless negative: the state and the convolution's window after `lengths` tokens."""
        cache = self._runner.req_to_token_pool.mamba_pool.mamba_cache
        windows = cache.intermediate_conv_window[
            0
        ]  # [L, R, B, C, W - 1], the last inputs after every block position
        kept = VerifyInputs(self._windows, windows[..., -1], *self._gates)
        self._fold(layers, cache.temporal, kept, rows, source, target, lengths)
        cache.conv[0][:, target.clamp(min=compat.UNREAD_SLOT)] = windows[:, rows, lengths - 1]


def make_rollback(asked: str, model_runner: Any, block_size: int) -> Rollback | None:
    """The rollback for this target, None where it has no recurrent layers. To be called before SGLang allocates its state pool.

    Raises:
        ConfigError: replay was asked for and the target's recurrent layers are not Gated DeltaNet.
    """
    kind = compat.recurrent_kind(model_runner.model_config)
    if kind is None:
        return None
    if kind != "Gated DeltaNet":
        if asked == "replay":
            raise ConfigError(
                f"--speculative-dflash-recurrent-rollback: 'replay' is for Gated DeltaNet layers, this target's are {kind}; "
                "give 'snapshot' or leave it at 'auto'"
            )
        return Snapshots(model_runner)
    if asked == "snapshot":
        return Snapshots(model_runner)
    from sglang_dflash.serving import replay_pool

    replay = Replay(model_runner, block_size, _fold_op(torch.device(model_runner.device)))
    replay_pool.install(replay.record)
    return replay


def _fold_op(device: torch.device) -> Fold:
    if device.type != "cuda":
        return fold_
    from dflash_kernels import gated_delta_fold

    return gated_delta_fold.fold_
