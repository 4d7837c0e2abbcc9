"""A seeded, resumable training loop with a progress bar: Muon on matrices, AdamW on the rest."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import nn

SAVE_EVERY_S = 60.0
SHOW_EVERY = 100


class Muon(torch.optim.Optimizer):
    """Muon (Keller Jordan, 2024) with AdamW-sized steps, in float32.

    torch's own orthogonalizes in bfloat16, which takes a quarter of the whole step on a CPU without
    bfloat16 units.
    """

    def __init__(self, params: list[nn.Parameter], lr: float, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                buffer = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
                buffer.lerp_(p.grad, 1 - group["momentum"])
                update = orthogonalize(p.grad.lerp(buffer, group["momentum"]))
                p.mul_(1 - 0.01 * group["lr"]).add_(
                    update, alpha=-0.2 * max(p.shape) ** 0.5 * group["lr"]
                )


def orthogonalize(g: torch.Tensor) -> torch.Tensor:
    """Five quintic Newton-Schulz steps towards the nearest semi-orthogonal matrix."""
    x = g / (g.norm() + 1e-7)
    if g.shape[0] > g.shape[1]:
        x = x.T
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.T if g.shape[0] > g.shape[1] else x


def make_optimizers(model: nn.Module, lr: float) -> list[torch.optim.Optimizer]:
    params = {n: p for n, p in model.named_parameters() if p.requires_grad}
    matrices = [
        p for n, p in params.items() if p.ndim == 2 and "embed" not in n and "lm_head" not in n
    ]
    inside = {id(p) for p in matrices}
    rest = [p for p in params.values() if id(p) not in inside]
    return [
        Muon(matrices, lr=lr),
        torch.optim.AdamW(rest, lr=lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def lr_scale(step: int, steps: int, warmup: int = 30, hold: float = 0.5) -> float:
    """Linear warm-up, a plateau until `hold` of the run, then linearly down to 1 %."""
    if step < warmup:
        return (step + 1) / warmup
    left = (steps - step) / (steps * (1 - hold))
    return max(0.01, min(1.0, left))


class Run:
    """The state of a training run: model, optimizers, step and CPU seconds spent."""

    def __init__(self, name: str, model: nn.Module, lr: float, work: Path) -> None:
        """Resumes from the state under `work` if there is one."""
        self.name, self.model, self.lr = name, model, lr
        self.optimizers = make_optimizers(model, lr)
        self.file = work / f"{name}.state.pt"
        self.step, self._spent, self._began = 0, 0.0, time.process_time()
        self._saved_at = time.monotonic()
        if self.file.exists():
            state = torch.load(self.file)
            model.load_state_dict(state["model"])
            for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
                optimizer.load_state_dict(saved)
            self.step, self._spent = state["step"], state["spent"]

    @property
    def spent(self) -> float:
        """CPU seconds so far, interruptions included."""
        return self._spent + time.process_time() - self._began

    def save(self, every_s: float = 0.0) -> None:
        """Save unless the last save is less than `every_s` seconds ago."""
        if time.monotonic() - self._saved_at < every_s:
            return
        state = {
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "step": self.step,
            "spent": self.spent,
        }
        # Replaced in one operation: a cut leaves the old state or the new one.
        torch.save(state, self.file.with_suffix(".tmp"))
        self.file.with_suffix(".tmp").replace(self.file)
        self._saved_at = time.monotonic()

    def update(self, loss: torch.Tensor, scale: float) -> None:
        """One optimizer step at `scale` times the learning rate."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.lr * scale
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.step += 1


def train(
    name: str,
    model: nn.Module,
    loss_of: Callable[[random.Random], tuple[torch.Tensor, dict[str, float]]],
    *,
    steps: int,
    lr: float,
    work: Path,
    seed: int = 0,
    warmup: int = 30,
    before_step: Callable[[int], None] = lambda step: None,
) -> None:
    """Run `steps` optimizer steps of `loss_of(rng)`, each after `before_step(step)`.

    The state is saved under `work`, from which an interrupted run resumes. `name` names the state
    file and seeds the data.
    """
    run, shown = Run(name, model, lr, work), {}
    columns = (
        TextColumn(name),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[shown]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, refresh_per_second=1) as bar:
        task = bar.add_task(name, total=steps, completed=run.step, shown="")
        while run.step < steps:
            before_step(run.step)
            # One generator per step: a resumed run sees the same data as an uninterrupted one.
            loss, figures = loss_of(random.Random(f"{seed}-{name}-{run.step}"))
            run.update(loss, lr_scale(run.step, steps, warmup))
            for key, value in {"loss": loss.item(), **figures}.items():
                shown[key] = value if key not in shown else 0.95 * shown[key] + 0.05 * value
            text = " ".join(f"{key} {value:.3f}" for key, value in shown.items())
            bar.update(task, completed=run.step, shown=text)
            if run.step % SHOW_EVERY == 0:
                print(f"{name} {run.step}/{steps} {text}", flush=True)
            run.save(every_s=SAVE_EVERY_S)
    run.save()
    print(f"{name}: {run.step} steps, {run.spent:.0f} CPU-seconds")
