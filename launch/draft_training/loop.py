"""A seeded, resumable training loop: Muon on matrices, AdamW on the rest, and an average of the
weights, which is what is measured and kept."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from .device import now

SAVE_EVERY_S = 120.0
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


def lr_scale(step: int, steps: int, warmup: int) -> float:
    """Linear warm-up, a plateau until 60 % of the run, then linearly down to 1 %.

    A run that is extended goes on with the rate that the longer run has there.
    """
    if step < warmup:
        return (step + 1) / warmup
    return max(0.01, min(1.0, 2.5 * (steps - step) / steps))


class Run:
    """A training run whose state lies under `work`, from which an interrupted one goes on.

    Args:
        name: of the state's file; it seeds the data.
        model: in the dtype that its forward and backward passes are computed in; the weights that
            are updated are float32.
        loss_of: of a step's random numbers: the loss, and the acceptance length of the batch.

    Attributes:
        step: steps so far; spent: seconds so far (`device.now`), interruptions included.
        average: weights, averaged over the last steps.
    """

    def __init__(
        self,
        name: str,
        model: nn.Module,
        loss_of: Callable[[random.Random], tuple[Tensor, float]],
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
        self.step, self.spent = 0, 0.0
        self.average = {n: p.detach().clone() for n, p in self.weights.items()}
        if self.file.exists():
            state = torch.load(self.file, map_location=self.device)
            self._set(state["weights"])
            for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
                optimizer.load_state_dict(saved)
            self.step, self.spent, self.average = (state[of] for of in ("step", "spent", "average"))
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

    def train(self, steps: int, until: float = float("inf")) -> float:
        """Go on to `steps` steps or `until` seconds of the run; the mean acceptance length of
        the batches of these steps."""
        saved_at, lengths = time.monotonic(), []
        while self.step < steps and self.spent < until:
            began = now(self.device)
            # One generator per step: a resumed run sees the same data as an uninterrupted one.
            loss, acceptance = self.loss_of(random.Random(f"0-{self.name}-{self.step}"))
            self._update(loss, self.lr * lr_scale(self.step, steps, self.warmup))
            lengths.append(acceptance)
            self.step += 1
            self.spent += now(self.device) - began
            if self.step % 10 == 0:
                recent = sum(lengths[-10:]) / len(lengths[-10:])
                print(
                    f"{self.name} {self.step}/{steps}: loss {loss.item():.3f}, acceptance in the "
                    f"batches {recent:.2f}, {self.spent:.0f} s",
                    flush=True,
                )
            if time.monotonic() - saved_at >= SAVE_EVERY_S:
                self.save()
                saved_at = time.monotonic()
        self.save()
        return sum(lengths) / max(1, len(lengths))

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
