"""Which kernels a server launches, and which of them it would compile while serving.

    python -m tests.kernels.served_launches

prints a JSON object: `kernels`, those that dflash_kernels defines; `launched`, those that a step
of the drafter, an acceptance and a commit of recurrent layers launch; `late`, those of which a
launch on another number of requests or tokens than at start-up would be compiled anew.

No GPU is needed: a launch is not made, what Triton would compile it for is computed. A process of
its own, because TRITON_INTERPRET must not be set when a kernel is defined.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import dflash_kernels
import torch
from dflash_kernels.draft_attention import TritonAttention
from dflash_kernels.draft_ops import TritonOps
from dflash_kernels.gated_delta_fold import fold_, move_windows_
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend
from triton.runtime.autotuner import Heuristics
from triton.runtime.jit import JITFunction, KernelInterface, create_function_from_signature

from sglang_dflash.drafting.attention.backend import Setting
from sglang_dflash.drafting.attention.table import RequestSlots
from sglang_dflash.drafting.drafter import Drafter
from sglang_dflash.drafting.graphs import GraphedDrafter
from sglang_dflash.drafting.heads import TargetHead
from sglang_dflash.drafting.model import DraftModel
from sglang_dflash.drafting.noise import BlockNoise
from sglang_dflash.drafting.options import Options
from sglang_dflash.drafting.self_check import _cases
from sglang_dflash.facts.draft_config import DraftConfig, LayerGroup
from sglang_dflash.serving.hybrid.rollback import Checkpoints, Replay, ReplayOps
from tests.conftest import kv_groups

BACKEND = make_backend(GPUTarget("cuda", 90, 32))
CONFIG = DraftConfig.from_dict(
    {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 4096,
        "vocab_size": 64,
        "block_size": 4,
        "num_target_layers": 6,
        "dflash_config": {
            "mask_token_id": 63,
            "target_layer_ids": [1, 3],
            "selector_rank": 8,
            "selector_top_k": 4,
            "conv_kernel_size": 2,
            "conv_group_size": 16,
        },
    }
)
ROWS, COLUMNS, SLOTS = 33, 2048, 4096
# One, odd and even ones, and ones from which on a program takes several.
REQUESTS = (1, 2, 3, 8, 13, 16, 29, 32)
TOKENS = (1, 2, 3, 7, 16, 17, 100, 511, 512, 513, 2047, 2048)


class Compilations:
    """What the launches so far are compiled for: `(kernel, specialization, options)`."""

    def __init__(self) -> None:
        self.all: set[tuple[str, str, str]] = set()
        self._binders: dict[str, Any] = {}

    def add(self, kernel: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        while isinstance(kernel, Heuristics):
            named = {**dict(zip(kernel.arg_names, args, strict=False)), **kwargs}
            kwargs = {**kwargs, **{name: of(named) for name, of in kernel.values.items()}}
            kernel = kernel.fn
        name = kernel.fn.__name__
        if name not in self._binders:
            made = create_function_from_signature(kernel.signature, kernel.params, BACKEND)
            self._binders[name] = made
        _, specialization, options = self._binders[name](*args, **kwargs)
        self.all.add((name, str(specialization), str(options)))

    @property
    def names(self) -> set[str]:
        return {name for name, _, _ in self.all}


@contextmanager
def watched() -> Iterator[Compilations]:
    """Launches inside are noted instead of made."""
    found = Compilations()

    def launcher(kernel: Any, grid: Any) -> Callable[..., None]:
        del grid
        return lambda *args, **kwargs: found.add(kernel, args, kwargs)

    with mock.patch.object(KernelInterface, "__getitem__", launcher):
        yield found


class TwoRuns:
    """A `Recorder` whose recordings do nothing."""

    def record(self, runs: Sequence[Callable[[], None]]) -> list[Callable[[], None]]:
        for run in runs:
            run()
        return [lambda: None] * len(runs)


def drafter_of(window: int | None) -> Drafter:
    """On Triton's operations. Tensors hold anything: nothing is computed."""
    model = DraftModel(CONFIG, ops=TritonOps()).bfloat16().freeze()
    options = Options(window=window).resolve(CONFIG)
    dtype = torch.bfloat16

    def attention(layers: LayerGroup) -> TritonAttention:
        columns = layers.reach.of(COLUMNS)
        setting = Setting(
            options.block_size, torch.device("cpu"), layers.layers, requests=ROWS, columns=columns
        )
        return TritonAttention(CONFIG, setting, processors=132)

    groups = kv_groups(model, options, SLOTS, 1000, dtype=dtype, attention=attention)
    head = TargetHead(
        lambda ids: torch.zeros(len(ids), CONFIG.hidden_size, dtype=dtype),
        lambda hidden: torch.zeros(len(hidden), CONFIG.vocab_size, dtype=dtype),
    )
    return Drafter(model, head, groups, options)


def replay_of() -> Replay:
    """Of two recurrent layers whose verify forward has been recorded."""
    depth, block, heads, dim, width = 2, CONFIG.block_size, 2, 16, 4
    channels = 2 * heads * dim + 2 * heads * dim

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.bfloat16)

    layer = SimpleNamespace(
        conv_weights=zeros(channels, width), bias=None, activation="silu",
        A_log=torch.zeros(2 * heads), dt_bias=zeros(2 * heads), num_k_heads=heads,
        num_v_heads=2 * heads, head_k_dim=dim, head_v_dim=dim,
    )  # fmt: skip
    pool = SimpleNamespace(
        recording=SimpleNamespace(
            layers=dict.fromkeys(range(depth), layer),
            gates=zeros(2, depth, ROWS, block, 2 * heads),
            windows=zeros(depth, ROWS, channels, width - 1),
        ),
        mamba_cache=SimpleNamespace(
            conv=[zeros(depth, ROWS, channels, width - 1)],
            temporal=torch.zeros(depth, ROWS, 2 * heads, dim, dim),
            intermediate_conv_window=[zeros(depth, ROWS, block, channels, width - 1)],
        ),
    )
    linear = SimpleNamespace(
        forward_metadata=SimpleNamespace(mamba_cache_indices=torch.zeros(ROWS, dtype=torch.int32)),
        _translate_mamba_indices=lambda indices: indices,
    )
    runner = SimpleNamespace(
        req_to_token_pool=SimpleNamespace(mamba_pool=pool),
        attn_backend=SimpleNamespace(linear_attn_backend=linear),
    )
    return Replay(runner, ReplayOps(fold_, move_windows_))


def serve(drafter: Any, ops: TritonOps, replay: Replay) -> None:
    """Steps of batches of any size, and prompts of any length."""
    block, table = CONFIG.block_size, drafter._table
    for count in REQUESTS:
        rows = torch.arange(count)
        ids = torch.zeros(count, block, dtype=torch.int64)
        accepted = ops.accept(ids, ids.clone())
        requests = RequestSlots(table, rows, torch.zeros_like(rows), COLUMNS)
        drafter.propose(accepted.bonus, requests)
        # A batch that no recording is for, with sampled requests.
        noise = BlockNoise(accepted.lengths, torch.zeros(count), accepted.bonus)
        drafter._drafter.propose(accepted.bonus, requests, noise)
        drafter._drafter.propose(accepted.bonus, requests)
        ops.continue_seen(ids, table[:, : COLUMNS - 7], requests, CONFIG.vocab_size)
        replay.commit(accepted.lengths, None)
        replay.commit(accepted.lengths, Checkpoints(rows, rows))
    width = CONFIG.target_hidden_width
    for tokens in TOKENS:
        _, positions = torch.zeros(2, tokens, dtype=torch.int64)
        hidden = torch.zeros(tokens, width, dtype=torch.bfloat16)
        drafter.absorb(hidden, positions, torch.arange(tokens))


def launches() -> dict[str, list[str]]:
    table, launched, late = torch.zeros(ROWS, COLUMNS, dtype=torch.int32), set(), set()
    with watched() as found, torch.no_grad():
        for window in (None, 100):
            # As a server starts: operations are checked, steps recorded, replay is warmed up.
            drafter, replay = drafter_of(window), replay_of()
            ops: Any = drafter.model.ops
            for run in _cases(drafter.model, CONFIG.block_size).values():
                run(ops)
            graphed = GraphedDrafter(drafter, TwoRuns(), table, REQUESTS)
            replay.warm_up()
            started = set(found.all)
            serve(graphed, ops, replay)
            late |= {name for name, _, _ in found.all - started}
        launched = found.names
    return {"kernels": sorted(defined()), "launched": sorted(launched), "late": sorted(late)}


def defined() -> set[str]:
    """Functions of dflash_kernels that are named as kernels are."""
    found = set()
    for module in pkgutil.iter_modules(dflash_kernels.__path__):
        loaded = importlib.import_module(f"dflash_kernels.{module.name}")
        for name, value in vars(loaded).items():
            if isinstance(value, (JITFunction, Heuristics)) and name.endswith("_kernel"):
                found.add(name)
    return found


if __name__ == "__main__":
    print(json.dumps(launches()))
