"""A seeded, resumable training loop: Muon on matrices, AdamW on the rest, and an average of the
weights, which is what is measured and kept."""

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
# The average goes back over so large a share of the steps so far.
AVERAGED = 0.1
# What is indexed by token, which is no matrix to Muon.
TABLES = ("embed", "lm_head", "codebook")


def make_optimizers(
    params: dict[str, nn.Parameter], codebooks: float
) -> list[torch.optim.Optimizer]:
    """`codebooks`: how much faster tables of a selector learn than the rest."""
    kinds: dict[str, list[nn.Parameter]] = {"matrix": [], "codebook": [], "rest": []}
    for name, param in params.items():
        is_matrix = param.ndim == 2 and not any(table in name for table in TABLES)
        kinds["matrix" if is_matrix else "codebook" if "codebook" in name else "rest"].append(param)
    groups = [{"params": kinds["rest"]}, {"params": kinds["codebook"], "factor": codebooks}]
    muon = torch.optim.Muon(kinds["matrix"], weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
    return [muon, torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.0)]


@dataclass(frozen=True)
class Length:
    """So many steps or seconds of training, whichever end first."""

    steps: float = float("inf")
    seconds: float = float("inf")

    def done(self, step: int, spent: float) -> float:
        """The share of it that is over after `step` steps and `spent` seconds."""
        return max(step / self.steps, spent / self.seconds)


def lr_scale(step: int, warmup: int, done: float) -> float:
    """Linear warm-up, a plateau until 60 % of the run are `done`, then linearly down to 1 %.

    A run that is extended goes on with the rate that the longer run has there.
    """
    if step < warmup:
        return (step + 1) / warmup
    return max(0.01, min(1.0, 2.5 * (1 - done)))


@contextmanager
def until_sigterm(run: Run) -> Iterator[None]:
    """Let SIGTERM cut a run at the end of its step (`Run.train`), in the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda *_: run.cut.set())
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class Run:
    """A training run whose state lies under `work`, from which an interrupted one goes on.

    Args:
        name: of the state's file; it seeds the data.
        model: in the dtype that its forward and backward passes are computed in; the weights that
            are updated are float32.
        loss_of: of a step's random numbers: the loss, and the acceptance length of the batch, both
            `[]` on the device.

    Attributes:
        step: steps so far; spent: seconds so far (`device.now`), interruptions included.
        average: weights, averaged over the last steps.
        cut: set it, and `train` leaves after its step.
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
            # AdamW's counts of steps stay on the host: on a GPU each would be waited for.
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
        """Replaced in one operation: a cut leaves the old state or the new one."""
        state = {
            "weights": {n: p.detach() for n, p in self.weights.items()},
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "average": self.average,
            "step": self.step,
            "spent": self.spent,
        }
        torch.save(state, self.file.with_suffix(".tmp"))
        self.file.with_suffix(".tmp").replace(self.file)

    def train(self, length: Length, until: float = float("inf")) -> float:
        """Go on to the end of a length, or to `until` seconds of the run; the mean acceptance
        length of the batches of these steps.

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

    def is_over(self, length: Length) -> bool:
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
