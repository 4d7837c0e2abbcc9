"""A seeded, resumable training loop with a progress bar: Muon on matrices, AdamW on the rest."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from sglang_dflash.bench.progress import progress_bar

SAVE_EVERY_S = 60.0


# What is indexed by token, which is no matrix to Muon.
TABLES = ("embed", "lm_head", "codebook")


def make_optimizers(model: nn.Module, codebooks: float) -> list[torch.optim.Optimizer]:
    """`codebooks`: how much faster tables of a selector learn than the rest."""
    params = {n: p for n, p in model.named_parameters() if p.requires_grad}
    kinds: dict[str, list[nn.Parameter]] = {"matrix": [], "codebook": [], "rest": []}
    for name, param in params.items():
        is_matrix = param.ndim == 2 and not any(table in name for table in TABLES)
        kinds["matrix" if is_matrix else "codebook" if "codebook" in name else "rest"].append(param)
    groups = [{"params": kinds["rest"]}, {"params": kinds["codebook"], "factor": codebooks}]
    muon = torch.optim.Muon(kinds["matrix"], weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
    return [muon, torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.0)]


def lr_scale(step: int, steps: int, warmup: int) -> float:
    """Linear warm-up, a plateau until half of the run, then linearly down to 1 %."""
    if step < warmup:
        return (step + 1) / warmup
    return max(0.01, min(1.0, 2 * (steps - step) / steps))


def train(
    name: str,
    model: nn.Module,
    loss_of: Callable[[random.Random], tuple[torch.Tensor, dict[str, float]]],
    *,
    steps: int,
    lr: float,
    work: Path,
    warmup: int = 30,
    codebooks: float = 1.0,
    before_step: Callable[[int], None] = lambda step: None,
) -> None:
    """Run `steps` optimizer steps of `loss_of(rng)`, each after `before_step(step)`.

    The state is saved under `work`, from which an interrupted run resumes. `name` names the state
    file and seeds the data.
    """
    file, optimizers = work / f"{name}.state.pt", make_optimizers(model, codebooks)
    done, spent = 0, 0.0
    if file.exists():
        state = torch.load(file)
        model.load_state_dict(state["model"])
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        done, spent = state["step"], state["spent"]
    began, saved_at = time.process_time(), time.monotonic()

    def save(step: int) -> None:
        state = {
            "model": model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in optimizers],
            "step": step,
            # CPU seconds so far, interruptions included.
            "spent": spent + time.process_time() - began,
        }
        # Replaced in one operation: a cut leaves the old state or the new one.
        torch.save(state, file.with_suffix(".tmp"))
        file.with_suffix(".tmp").replace(file)

    with progress_bar(steps) as bar:
        bar.set_description(name)
        bar.update(done)
        for step in range(done, steps):
            before_step(step)
            # One generator per step: a resumed run sees the same data as an uninterrupted one.
            loss, figures = loss_of(random.Random(f"0-{name}-{step}"))
            update(model, optimizers, loss, lr * lr_scale(step, steps, warmup))
            bar.set_postfix(loss=loss.item(), **figures)
            bar.update()
            if time.monotonic() - saved_at >= SAVE_EVERY_S:
                save(step + 1)
                saved_at = time.monotonic()
    save(steps)


def update(
    model: nn.Module, optimizers: list[torch.optim.Optimizer], loss: torch.Tensor, lr: float
) -> None:
    """One optimizer step."""
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = lr * group.get("factor", 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
