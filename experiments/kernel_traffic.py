"""Bytes that each kernel of `dflash_kernels` moves in a launch, of its arguments."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_kernels import (
    accept,
    add_rms_norm,
    block_attention,
    candidates,
    context_table,
    convolve,
    draft_source,
    gated_delta_fold,
    penalize,
    place,
    prepare_block,
    qk_norm_rope,
    sample_filtered,
    sample_whole,
    silu_mul,
    text_match,
    walk,
)
from dflash_kernels.traffic import Traffic

from sglang_dflash.checkpoint.draft_config import LayerAttention, Reach
from sglang_dflash.drafting.attention.capabilities import Splits
from sglang_dflash.drafting.recurrent.replay import RecurrentLayers, VerifyInputs

REGISTERS = Path(__file__).parents[1] / "tests/kernels/registers.json"
# The compute capability of an H100.
INSTRUCTION_SET = "90"


@dataclass(frozen=True)
class StepContents:
    """Contents of a step's tensors that decide how much is moved.

    Attributes:
        lengths: committed tokens of each request.
        stored: number of tokens whose context K/V is stored.
    """

    lengths: Sequence[int]
    stored: int = 0


def instructions_of(name: str, args: Any, kwargs: Any) -> tuple[float, float]:
    """Return the least and the most instructions that a launch executes, if it reads the logits of
    the whole vocabulary; (0, 0) of other kernels."""
    if name not in READS_LOGITS:
        return 0, 0
    case, at = READS_LOGITS[name]
    used = json.loads(REGISTERS.read_text())[case.format(**kwargs)][INSTRUCTION_SET]
    return used["at_least"] * args[at].numel(), used["at_most"] * args[at].numel()


def _context_table(scene: StepContents, args: Any, kwargs: Any) -> Traffic:
    limit, sinks = args[11:13]
    reach = Reach(limit - sinks, sinks)
    return context_table.traffic(args[0].shape[1], scene.lengths, reach, kwargs["HAS_TAGS"])


def _block_attention(scene: StepContents, args: Any, kwargs: Any) -> Traffic:
    """Return the traffic of the splits and of their merge."""
    q, _, _, old, _, entries = args[:6]
    kv_heads, limit, sinks = old.shape[1], args[-1], kwargs["SINKS"]
    reach, each = Reach(limit - sinks, sinks), args[-2]
    splits = Splits(each, args[9].shape[2] if kwargs["IS_SPLIT"] else 1)
    return block_attention.traffic(
        tuple(q.shape), kv_heads, entries.shape[1], scene.lengths,
        LayerAttention(kwargs["WINDOW"] or None, kwargs["CAUSAL"], reach),
        splits, q.element_size(), old.element_size(),
    )  # fmt: skip


def _add_rms_norm(scene: StepContents, args: Any, kwargs: Any) -> Traffic:
    _, x, residual, bias = args[:4]
    summands = {"residual": residual is not None, "bias": bias is not None}
    return add_rms_norm.traffic(
        *x.shape, x.element_size(), **summands, store_sum=kwargs["STORE_SUM"]
    )


def _qk_norm_rope(scene: StepContents, args: Any, kwargs: Any) -> Traffic:
    heads = kwargs["H"], kwargs["G"], kwargs["D"]
    return qk_norm_rope.traffic(len(args[0]), *heads, args[0].element_size())


def _write_context(scene: StepContents, args: Any, kwargs: Any) -> Traffic:
    cache, kv = args[:2]
    count, depth, _, kv_heads, head_dim = kv.shape
    return qk_norm_rope.write_context_traffic(
        count, scene.stored, depth, kv_heads, head_dim, kv.element_size(), cache.element_size()
    )


def _fold(scene: StepContents, args: Any, kwargs: Any) -> Traffic:
    """With a checkpoint of every request, if there may be any."""
    states, *inputs = args[:5]
    weight, bias, a_log, dt_bias = args[11:15]
    sizes = (kwargs[name] for name in ("H", "HV", "K", "V"))
    layers = RecurrentLayers(weight, bias, "silu", a_log, dt_bias, *sizes)
    checkpoints = None if args[9] is None else len(args[5])
    accepted = [scene.stored] * len(args[5])
    return gated_delta_fold.traffic(layers, states, VerifyInputs(*inputs), accepted, checkpoints)


def _move_windows(scene: StepContents, args: Any, kwargs: Any) -> Traffic:
    pool, rows, checkpoints = args[0], len(args[2]), args[5]
    return gated_delta_fold.window_traffic(pool, rows, None if checkpoints is None else rows)


def _convolve(scene: StepContents, args: Any, kwargs: Any) -> Traffic:
    x, bias = args[1:3]
    requests, block, width = x.shape
    size, has_bias = x.element_size(), bias is not None
    return convolve.traffic(requests, block, width, kwargs["K"], args[9], size, has_bias)


def _largest_of_chunks(scene: StepContents, args: Any, kwargs: Any) -> Traffic:
    sums, logits = args[2:4]
    count, width = logits.shape
    return candidates.chunk_traffic(count, width, logits.element_size(), sums is not None)


def _candidates(scene: StepContents, args: Any, kwargs: Any) -> Traffic:
    logits = args[3]
    return candidates.traffic(len(logits), logits.shape[1], kwargs["K"], logits.element_size())


def _walk(scene: StepContents, args: Any, kwargs: Any) -> Traffic:
    ids, hidden, seeds = args[3], args[5], args[8]
    size, rank = (0, 0) if hidden is None else (hidden.element_size(), hidden.shape[-1])
    requests, drafts, k = ids.shape
    return walk.traffic(requests, drafts, k, rank, size, noise=seeds is not None)


def _take_match(scene: StepContents, args: Any, kwargs: Any) -> Traffic:
    """Return the traffic if all tokens that follow a match are in the text."""
    requests, count = args[1].shape
    return text_match.take_traffic(requests, max(scene.lengths), count, in_text=requests * count)


def _penalize(scene: StepContents, args: Any, kwargs: Any) -> Traffic:
    """Return the traffic if every request has all kinds of penalties that the batch has."""
    logits, block, kinds = args[0], args[1], [args[i] for i in (4, 7, 10, 14)]
    shape = *block.shape, logits.shape[1]
    return penalize.traffic(shape, logits.element_size(), kinds, [sum(kinds)] * len(block))


COUNTED_BEFORE = ("merge_kernel", "merge_samples_kernel", "rank_samples_kernel",
                  "sample_others_kernel", "rank_entries_kernel", "place_kernel")  # fmt: skip
KERNELS: dict[str, Callable[[StepContents, Any, Any], Traffic]] = {
    "context_table_kernel": _context_table,
    "block_attention_kernel": _block_attention,
    "add_rms_norm_kernel": _add_rms_norm,
    "qk_norm_rope_kernel": _qk_norm_rope,
    "write_context_kernel": _write_context,
    "silu_mul_kernel": lambda _, args, __: silu_mul.traffic(
        len(args[0]), args[0].shape[1], args[0].element_size()
    ),
    "convolve_kernel": _convolve,
    "largest_of_chunks_kernel": _largest_of_chunks,
    "candidates_kernel": _candidates,
    "sample_candidates_kernel": lambda _, args, __: sample_filtered.traffic(args[1], args[17]),
    "walk_kernel": _walk,
    "penalize_kernel": _penalize,
    # If every draft is drawn, and rejected.
    "judge_drafts_kernel": lambda _, args, __: sample_whole.drawn_traffic(args[1], args[9]),
    "sample_whole_kernel": lambda _, args, __: (
        sample_whole.traffic(args[2]) if args[3] is None else Traffic(0, 0)
    ),
    # The launch before has counted for it.
    **dict.fromkeys(COUNTED_BEFORE, lambda *_: Traffic(0, 0)),
    "fold_kernel": _fold,
    "move_windows_kernel": _move_windows,
    "prepare_block_kernel": lambda _, args, __: prepare_block.traffic(*args[0].shape),
    "find_match_kernel": lambda scene, args, _: text_match.find_traffic(
        scene.lengths, max(scene.lengths)
    ),
    "take_match_kernel": _take_match,
    "choose_source_kernel": lambda _, args, __: draft_source.choose_traffic(
        *args[0].shape, drafted=args[4].shape[1]
    ),
    "learn_source_kernel": lambda _, args, __: draft_source.learn_traffic(*args[2].shape[1:]),
    "accept_kernel": lambda _, args, __: accept.traffic(*args[0].shape),
    # All three launches.
    "count_unused_kernel": lambda _, args, __: place.traffic(*args[5:7]),
}

# Kernels that read logits -> row of the table of compiled kernels, index of the logits argument.
READS_LOGITS = {
    "largest_of_chunks_kernel": ("largest_of_chunks sums={HAS_SUMS}", 3),
    "candidates_kernel": ("candidates 262144 k{K}", 3),
    "sample_whole_kernel": ("sample_whole drawn=False", 2),
    "penalize_kernel": ("penalize", 0),
}
