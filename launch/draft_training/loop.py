"""A seeded, resumable training loop: Muon for matrices, AdamW for other parameters, and an average
of the weights, which is measured and saved."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from .device import now

SAVE_EVERY_S = 120.0
# Steps from one line of output to the next; each waits for a GPU.
LINE = {"cpu": 10, "cuda": 100}
# The share of the steps so far that the average reaches back.
AVERAGED = 0.1
# Parameters that are indexed by token, which are not matrices for Muon.
TABLES = ("embed", "lm_head", "codebook")


def make_optimizers(
    params: dict[str, nn.Parameter], codebooks: float
) -> list[torch.optim.Optimizer]:
    """Make Muon and AdamW. `codebooks`: factor on the learning rate of a selector's tables."""
    kinds: dict[str, list[nn.Parameter]] = {"matrix": [], "codebook": [], "rest": []}
    for name, param in params.items():
        is_matrix = param.ndim == 2 and not any(table in name for table in TABLES)
        kinds["matrix" if is_matrix else "codebook" if "codebook" in name else "rest"].append(param)
    groups = [{"params": kinds["rest"]}, {"params": kinds["codebook"], "factor": codebooks}]
    muon = torch.optim.Muon(kinds["matrix"], weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
    return [muon, torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.0)]


@dataclass(frozen=True)
class TrainingLimit:
    """The length of a training run: steps or seconds, whichever end first."""

    steps: float = float("inf")
    seconds: float = float("inf")

    def done(self, step: int, spent: float) -> float:
        """Return the share of the run that is over after `step` steps and `spent` seconds."""
        return max(step / self.steps, spent / self.seconds)


def lr_scale(step: int, warmup: int, done: float) -> float:
    """Return the learning rate's scale: a linear warm-up, a plateau until 60 % of the run are
    `done`, then a linear decay to 1 %.

    An extended run continues with the rate that the longer run has at that step.
    """
    if step < warmup:
        return (step + 1) / warmup
    return max(0.01, min(1.0, 2.5 * (1 - done)))


@contextmanager
def until_sigterm(run: TrainingRun) -> Iterator[None]:
    """Let SIGTERM end a run after its current step. Main thread only."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda *_: run.cut.set())
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class TrainingRun:
    """A training run that resumes from its state in the folder `work`.

    Args:
        name: the name of the state's file, which also seeds the data.
        model: the model, in the dtype of its forward and backward passes. The weights that are
            updated are float32 copies.
        loss_of: computes the loss and the acceptance length of a batch, both `[]` on the device,
            from a step's random generator.

    Attributes:
        step: number of steps so far.
        spent: seconds so far (`device.now`), over all resumed runs.
        average: weights, averaged over the last steps.
        cut: if it is set, `train` ends after its current step.
    """

    def __init__(
        self,
        name: str,
        model: nn.Module,
        loss_of: Callable[[random.Random], tuple[Tensor, Tensor]],
        *,
        lr: float,
        work: Path,
        warmup: int = 30,
        codebooks: float = 1.0,
    ) -> None:
        self.name, self.model, self.loss_of = name, model, loss_of
        self.lr, self.warmup, self.file = lr, warmup, work / f"{name}.state.pt"
        self.weights = {
            n: nn.Parameter(p.detach().float().clone()) for n, p in model.named_parameters()
        }
        self.device = next(iter(self.weights.values())).device
        self.optimizers = make_optimizers(self.weights, codebooks)
        self.step, self.spent, self.cut = 0, 0.0, threading.Event()
        self.average = {n: p.detach().clone() for n, p in self.weights.items()}
        if self.file.exists():
            # AdamW's step counts stay on the host: reading them from a GPU would wait for it.
            state = torch.load(self.file, map_location="cpu")
            self._set(state["weights"])
            for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
                optimizer.load_state_dict(saved)
            self.step, self.spent = state["step"], state["spent"]
            self.average = {n: p.to(self.device) for n, p in state["average"].items()}
        self._copy()

    @torch.no_grad()
    def _set(self, weights: dict[str, Tensor]) -> None:
        for name, value in weights.items():
            self.weights[name].copy_(value)

    @torch.no_grad()
    def _copy(self) -> None:
        for name, param in self.model.named_parameters():
            param.copy_(self.weights[name])
            param.grad = None

    def save(self) -> None:
        """Save the state atomically: an interruption leaves the old state or the new one."""
        state = {
            "weights": {n: p.detach() for n, p in self.weights.items()},
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "average": self.average,
            "step": self.step,
            "spent": self.spent,
        }
        torch.save(state, self.file.with_suffix(".tmp"))
        self.file.with_suffix(".tmp").replace(self.file)

    def train(self, length: TrainingLimit, until: float = float("inf")) -> float:
        """Train to the limit, or until the run has taken `until` seconds.

        Returns:
            The mean acceptance length of the batches of these steps.

        Raises:
            SystemExit: the run was cut; its state is saved.
        """
        saved_at, line = time.monotonic(), LINE[self.device.type]
        lengths: list[Tensor] = []
        while not self.cut.is_set() and self.spent < until and not self.is_over(length):
            began = now(self.device)
            # One generator per step: a resumed run sees the same data as an uninterrupted one.
            loss, acceptance = self.loss_of(random.Random(f"0-{self.name}-{self.step}"))
            rate = lr_scale(self.step, self.warmup, length.done(self.step, self.spent))
            self._update(loss, self.lr * rate)
            lengths.append(acceptance)
            self.step += 1
            self.spent += now(self.device) - began
            if self.step % line == 0:
                print(
                    f"{self.name} {self.step} ({length.done(self.step, self.spent):.1%}): loss "
                    f"{loss.item():.3f}, acceptance in the batches {_mean(lengths[-line:]):.2f}, "
                    f"{self.spent:.0f} s",
                    flush=True,
                )
            if time.monotonic() - saved_at >= SAVE_EVERY_S:
                self.save()
                saved_at = time.monotonic()
        self.save()
        if self.cut.is_set():
            print(f"{self.name}: cut after {self.step} steps; saved", flush=True)
            raise SystemExit(0)
        return _mean(lengths)

    def is_over(self, length: TrainingLimit) -> bool:
        return length.done(self.step, self.spent) >= 1

    def _update(self, loss: Tensor, lr: float) -> None:
        """One optimizer step."""
        loss.backward()
        for name, param in self.model.named_parameters():
            self.weights[name].grad = None if param.grad is None else param.grad.float()
        torch.nn.utils.clip_grad_norm_(self.weights.values(), 1.0)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr * group.get("factor", 1.0)
            optimizer.step()
        share = min(1.0, 1 / (1 + AVERAGED * self.step))
        with torch.no_grad():
            for name, value in self.weights.items():
                self.average[name].lerp_(value, share)
        self._copy()


def _mean(lengths: list[Tensor]) -> float:
    return torch.stack(lengths).mean().item() if lengths else 0.0
