"""Kernels that a server launches, and those of them that it would compile while serving.

    python -m tests.kernels.served_launches

prints a JSON object: `kernels`, those that dflash_kernels defines; `launched`, those that a step
of the drafter, an acceptance and a commit of recurrent layers launch; `late`, those of which a
launch on another number of requests or tokens than at start-up would be compiled anew; `attention`,
by published draft and ranks, how often attention is compiled for a kind of layer while steps are
recorded, at most.

No GPU is needed: a launch is not made, what Triton would compile it for is computed. A process of
its own, because TRITON_INTERPRET must not be set when a kernel is defined.
"""

from __future__ import annotations

import importlib
import itertools
import json
import pkgutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import dflash_kernels
import torch
from dflash_kernels.draft_attention import TritonAttention
from dflash_kernels.draft_ops import TritonOps
from dflash_kernels.gated_delta_fold import fold_, move_windows_
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend
from triton.runtime.autotuner import Heuristics
from triton.runtime.jit import JITFunction, KernelInterface, create_function_from_signature

from sglang_dflash.checkpoint.draft_config import WHOLE_CONTEXT, DraftConfig, LayerGroup
from sglang_dflash.checkpoint.published import shipped
from sglang_dflash.drafting.attention.backend import AttentionSizes
from sglang_dflash.drafting.attention.capabilities import AttentionLoad
from sglang_dflash.drafting.attention.table import ContextTable, RequestSlots
from sglang_dflash.drafting.draft_source import DraftSource
from sglang_dflash.drafting.drafter import Drafter
from sglang_dflash.drafting.graphs import GraphedDrafter, default_column_buckets
from sglang_dflash.drafting.heads.head import TargetHead
from sglang_dflash.drafting.model import DraftModel
from sglang_dflash.drafting.noise import BlockNoise
from sglang_dflash.drafting.options import Options
from sglang_dflash.drafting.penalties import Penalties, Penalty, Stops
from sglang_dflash.drafting.self_check import op_cases
from sglang_dflash.serving.hybrid.rollback import Checkpoints, Replay
from sglang_dflash.serving.step.penalties import BlockPenalties
from tests.conftest import kv_groups, raw_config, with_own
from tests.serving.recurrent_target import gdn_layer, recorded_runner

BACKEND = make_backend(GPUTarget("cuda", 90, 32))
OWN = with_own(selector_rank=8, selector_top_k=4, conv_kernel_size=2, conv_group_size=16)
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
CONFIG = DraftConfig.from_dict(raw_config(**SIZES, **OWN))
ROWS, COLUMNS, SLOTS = 33, 2048, 4096
# One, odd and even ones, and ones from which on a program takes several.
REQUESTS = (1, 2, 3, 8, 13, 16, 29, 32)
# What SGLang records for 48 requests, and its request-to-token table of 40,960 tokens of context.
RECORDED, POSITIONS = (1, 2, 4, 8, 12, 16, 24, 32, 40, 48), 40_964
DRAFTS = (
    "z-lab/Qwen3-8B-DFlash-b16",
    "z-lab/Qwen3.5-27B-DFlash",
    "z-lab/Qwen3.5-35B-A3B-DFlash",
    "z-lab/Qwen3.8-27B-DFlash2",
)
TOKENS = (1, 2, 3, 7, 16, 17, 100, 511, 512, 513, 2047, 2048)


class Compilations:
    """The compilations that the launches so far need: `(kernel, specialization, options)`."""

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
    """Make a drafter on Triton's operations. Tensors hold anything: nothing is computed."""
    model = DraftModel(CONFIG, ops=TritonOps()).bfloat16().freeze()
    options = Options(window=window).resolve(CONFIG)
    dtype = torch.bfloat16

    def attention(layer_group: LayerGroup) -> TritonAttention:
        columns = layer_group.reach.tokens_read(COLUMNS)
        load = AttentionLoad(CONFIG, options.draft_block, ROWS, columns, processors=132)
        return TritonAttention(AttentionSizes(load, torch.device("cpu"), layer_group.attentions))

    groups = kv_groups(model, options, SLOTS, 1000, dtype=dtype, attention=attention)
    head = TargetHead(
        lambda ids: torch.zeros(len(ids), CONFIG.hidden_size, dtype=dtype),
        lambda hidden: torch.zeros(len(hidden), CONFIG.vocab_size, dtype=dtype),
    )
    return Drafter(model, head, groups, options)


def replay_of() -> Replay:
    """Make a replay of two recurrent layers whose verify forward has been recorded."""
    dtype = torch.bfloat16
    runner = recorded_runner(gdn_layer(2, 16, dtype), 2, ROWS, CONFIG.block_size, dtype)
    return Replay(runner, fold_, move_windows_)


def serve(drafter: Any, ops: TritonOps, replay: Replay) -> None:
    """Steps of batches of any size, and prompts of any length."""
    block, table = CONFIG.block_size, drafter._table
    source = DraftSource(block, CONFIG.vocab_size, drafter.counters)
    for count in REQUESTS:
        rows = torch.arange(count)
        ids = torch.zeros(count, block, dtype=torch.int64)
        # Of a narrow step, and of a whole block.
        ops.accept(ids[:, :3].contiguous(), ids[:, :3].clone())
        accepted = ops.accept(ids, ids.clone())
        requests = RequestSlots(table, rows, torch.zeros_like(rows), COLUMNS)
        drafter.propose(accepted.bonus, requests)
        drafter.propose(accepted.bonus, requests, None, 3)
        # A batch that no recording is for, with sampled requests.
        noise = BlockNoise(accepted.lengths, torch.zeros(count), accepted.bonus)
        drafter._drafter.propose(accepted.bonus, requests, noise)
        drafter._drafter.propose(accepted.bonus, requests)
        newest = ids[:, 0].contiguous()
        match = ops.find_match(newest, table[:, : COLUMNS - 7], requests, block - 1)
        for width in (3, block):
            _, drafts = ops.choose_source(source, ids, ids, *match, width)
            ops.learn_source(source, drafts, ops.accept(ids[:, :width], ids[:, :width].clone()))
        for kinds in itertools.product((False, True), repeat=len(Penalties._fields)):
            penalize(ops, ids[:, : 3 + kinds[0]], kinds)
        replay.commit(accepted.lengths, None)
        replay.commit(accepted.lengths, Checkpoints(rows, rows))
    width = CONFIG.target_hidden_width
    for tokens in TOKENS:
        _, positions = torch.zeros(2, tokens, dtype=torch.int64)
        hidden = torch.zeros(tokens, width, dtype=torch.bfloat16)
        drafter.absorb(hidden, positions, torch.arange(tokens))


def penalize(ops: TritonOps, block: torch.Tensor, kinds: Sequence[bool]) -> None:
    """Penalize a block with the kinds of `Penalties` that are True, and stop tokens in SGLang's
    table before and after a batch was filtered."""
    count, width = block.shape
    logits = torch.zeros(count, width, CONFIG.vocab_size)
    counts = torch.zeros(2 * count + 1, 1, dtype=torch.int32)
    per_token = torch.zeros(2 * count + 1, 1)
    for stops in (torch.zeros(count, CONFIG.vocab_size + 1)[:, :-1], logits[:, 0].clone()):
        of_kinds = [
            Penalty(logits[:, 0].clone(), per_token[count:][:count]),
            Penalty(logits[:, 0].clone(), per_token[:count]),
            Penalty(logits[:, 0].clone(), per_token[-count:]),
            Stops(stops, counts[:count], counts[-count:]),
        ]
        present = (x if has else None for x, has in zip(of_kinds, kinds, strict=True))
        ops.penalize(logits, block, Penalties(*present))


def launches() -> dict[str, list[str]]:
    table, launched, late = torch.zeros(ROWS, COLUMNS, dtype=torch.int32), set(), set()
    with watched() as found, torch.no_grad():
        for window in (None, 100):
            # As a server starts: operations are checked, steps recorded, replay is warmed up.
            drafter, replay = drafter_of(window), replay_of()
            ops: Any = drafter.model.ops
            for run in op_cases(drafter.model, CONFIG.block_size, CONFIG.block_size).values():
                run(ops)
            graphed = GraphedDrafter(drafter, TwoRuns(), table, REQUESTS, widths=(3,))
            replay.warm_up()
            device = torch.device("cpu")
            BlockPenalties(ROWS, CONFIG.block_size, device, ops).warm_up(CONFIG.vocab_size)
            started = set(found.all)
            serve(graphed, ops, replay)
            late |= {name for name, _, _ in found.all - started}
        launched = found.names
    return {
        "kernels": sorted(defined()),
        "launched": sorted(launched),
        "late": sorted(late),
        "attention": {f"{name} tp{n}": compiled_for(name, n) for name in DRAFTS for n in (1, 8)},
    }


def compiled_for(draft: str, ranks: int) -> int:
    """Compilations of attention for a kind of layer, its merge included, at most: in all batches
    and contexts that a server records."""
    config, counts = DraftConfig.from_dict(shipped("draft")[draft].config), []
    dtype, device = torch.bfloat16, torch.device("cpu")
    part, block = config.of_rank(ranks), config.block_size
    heads, kv_heads = part.num_attention_heads, part.num_key_value_heads
    for layer_group in config.groups(WHOLE_CONTEXT):
        shape = 64, len(layer_group.attentions), 2, kv_heads, config.head_dim
        kv = torch.zeros(shape, dtype=dtype)
        load = AttentionLoad(part, block, RECORDED[-1], POSITIONS, processors=132)
        attention = TritonAttention(AttentionSizes(load, device, layer_group.attentions))
        for layer in {of: i for i, of in enumerate(layer_group.attentions)}.values():
            with watched() as found:
                for count, positions in itertools.product(
                    RECORDED, default_column_buckets(POSITIONS)
                ):
                    columns = layer_group.reach.tokens_read(positions)
                    entries = torch.zeros(count, columns, dtype=torch.int32)
                    attention.prepare(kv, ContextTable(entries, torch.zeros(count).long()))
                    q = torch.zeros(count, block, heads, config.head_dim, dtype=dtype)
                    k, v = q.new_zeros(2, count, block, kv_heads, config.head_dim)
                    attention.attend(layer, q, k, v)
            counts.append(len(found.all))
    return max(counts)


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
