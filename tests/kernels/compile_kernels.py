"""Compile the kernels for GPUs that need not be here, at the shapes of the published drafts.

    python -m tests.kernels.compile_kernels CAPABILITY...

prints a JSON object: case -> capability -> registers per thread, bytes of stack and local memory
(0 without spills), and bytes of shared memory; of kernels that read logits also the instructions
per logit, at least and at most. With `--write`, the table that the test compares with is written,
with `--write NAME...` its rows that begin so.

A process of its own, because TRITON_INTERPRET must not be set when a kernel is defined.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import triton
from dflash_kernels import (
    accept,
    add_rms_norm,
    block_attention,
    candidates,
    context_table,
    convolve,
    draft_source,
    gated_delta_fold,
    place,
    prepare_block,
    qk_norm_rope,
    silu_mul,
    text_match,
    walk,
)
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from sglang_dflash.checkpoint.draft_config import DraftConfig
from sglang_dflash.checkpoint.heads.dflash2 import MOST_CANDIDATES
from sglang_dflash.checkpoint.published import shipped
from sglang_dflash.drafting.draft_source import CLASSES, DECAY, PRIOR_STEPS
from tests.kernels.case import BYTES, Case, pointer
from tests.kernels.instructions import WARP, dump, executed
from tests.kernels.target_cases import target_cases

CAPABILITIES = (80, 90, 100, 120)
TABLE = Path(__file__).with_name("registers.json")
# Qwen3.5-27B's heads, without a convolution bias.
GATED_DELTA = {"H": 16, "HV": 48, "K": 128, "V": 128, "W": 4, "BLOCK_K": 128, "HAS_BIAS": False,
               "p_bias": None}  # fmt: skip
NOISE = "p_seeds", "p_temperatures", "p_seq_lens", "p_scores"
NO_CHECKPOINTS = {"p_checkpoints": None, "p_steps": None}


def published() -> list[DraftConfig]:
    """Drafts whose facts are shipped; what they do not show has no part in a kernel's shape."""
    configs = []
    for facts in shipped("draft").values():
        if facts.config is not None:
            own = {"mask_token_id": 0, **facts.config["dflash_config"]}
            configs.append(DraftConfig.from_dict({**facts.config, "dflash_config": own}))
    return configs


def attention_cases(config: DraftConfig) -> list[Case]:
    """Every kind of layer: without splits; with splits and sinks, for each cache dtype."""
    block, groups = config.block_size, config.num_attention_heads // config.num_key_value_heads
    found = []
    for layer in sorted(set(config.layers), key=str):
        launches = [("bf16", "bf16", False), ("bf16", "bf16", True), ("bf16", "fp8e4nv", True)]
        if (block, groups) in ((16, 4), (8, 8)) and layer.sliding_window is None:
            launches += [("fp16", "fp16", True), ("bf16", "fp32", True), ("fp32", "fp32", True)]
        for dtype, cache, is_split in launches:
            sizes = BYTES[dtype], BYTES[cache]
            tile = block_attention.tiles(block, groups, config.head_dim, *sizes, is_split)
            shape = {
                "B": block,
                "GROUPS": groups,
                "D": config.head_dim,
                "WINDOW": layer.sliding_window or 0,
                "SINKS": 4 * is_split,
                "BLOCK_N": tile.columns,
            }
            size = f"b{block} g{groups} d{config.head_dim}"
            kind = f"{'causal' if layer.causal else 'full'}-{shape['WINDOW']}"
            own = {"CAUSAL": layer.causal, "BLOCK_M": tile.rows, "BLOCK_B": tile.block}
            own |= {"IS_SPLIT": is_split}
            found.append(
                Case(
                    f"block_attention {dtype}-{cache} {size} {kind}{' split' * is_split}",
                    block_attention.block_attention_kernel,
                    {**shape, **own},
                    types={"p_old_k": f"*{cache}", "p_old_v": f"*{cache}", "SCALE": "fp32"},
                    dtype=dtype,
                    options={"num_warps": tile.warps, "num_stages": tile.stages},
                    since=90 if cache == "fp8e4nv" else 80,
                )
            )
            if (dtype, cache, is_split) == ("bf16", "bf16", True):
                constants = {**shape, "BLOCK_M": block_attention.MERGE_ROWS}
                merge, options = block_attention.merge_kernel, {"num_warps": 2}
                found.append(Case(f"merge {size} {kind}", merge, constants, options=options))
    return found


def layer_cases(config: DraftConfig) -> list[Case]:
    """Norms, activation, q and k, context K/V."""
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    half = triton.next_power_of_2(config.head_dim // 2)
    shape = {"G": kv_heads, "D": config.head_dim, "BLOCK_F": half}
    size, scalars = f"g{kv_heads} d{config.head_dim}", {"EPS": "fp32", "FACTOR": "fp32"}
    width = triton.next_power_of_2(config.hidden_size)
    found = [
        Case(
            f"add_rms_norm {width}{' residual bias' * extra}",
            add_rms_norm.add_rms_norm_kernel,
            {
                "BLOCK_E": width,
                "STORE_SUM": True,
                "HAS_RESIDUAL": extra,
                "HAS_BIAS": extra,
                **({} if extra else {"p_residual": None, "p_bias": None}),
            },
            types=scalars,
            options={"num_warps": add_rms_norm.warps(width)},
        )
        for extra in (False, True)
    ]
    found.append(
        Case(
            f"qk_norm_rope h{heads} {size}",
            qk_norm_rope.qk_norm_rope_kernel,
            {**shape, "H": heads, "BLOCK_H": qk_norm_rope.BLOCK_H},
            types=scalars,
        )
    )
    blocks = {**shape, "BLOCK_G": triton.next_power_of_2(kv_heads)}
    for cache, dtype in (("bf16", torch.bfloat16), ("fp8e4nv", torch.float8_e4m3fn)):
        found.append(
            Case(
                f"write_context {cache} {size}",
                qk_norm_rope.write_context_kernel,
                {**blocks, "LIMIT": torch.finfo(dtype).max},
                types={**scalars, "p_cache": f"*{cache}", "p_entries": "*i64"},
                since=90 if cache == "fp8e4nv" else 80,
            )
        )
    return found


def step_cases(config: DraftConfig) -> list[Case]:
    """Return the kernels that run once per step."""
    block = config.block_size
    sizes = {"B": block, "BLOCK": prepare_block.BLOCK}
    following = triton.next_power_of_2(block - 1)
    taken = {"PIECES": text_match.PIECES, "BLOCK": following}
    one_warp = {"num_warps": 1}
    return [
        Case(f"prepare_block b{block}", prepare_block.prepare_block_kernel, sizes),
        Case(f"take_match b{following}", text_match.take_match_kernel, taken, options=one_warp),
        *source_cases(block),
    ]


def source_cases(block: int) -> list[Case]:
    """Return the kernels that choose between drafts and looked-up drafts, and learn from it."""
    drafts = block - 1
    shape = {"P": drafts, "BLOCK_P": triton.next_power_of_2(drafts)}
    shape |= {"CLASSES": CLASSES}
    chooses = {**shape, "PRIOR_STEPS": PRIOR_STEPS}
    learns = {**shape, "DECAY": DECAY, "BLOCK_R": draft_source.BLOCK_R}
    options = {"num_warps": 1}
    return [
        Case(
            f"choose_source b{block}", draft_source.choose_source_kernel, chooses, options=options
        ),
        Case(f"learn_source b{block}", draft_source.learn_source_kernel, learns),
    ]


def place_cases() -> list[Case]:
    """Return the kernels that find entries of a ring, of a commit and, without flags of live
    tokens, of a prompt."""
    tile = {"TILE": place.TILE}
    chunks = {**tile, "CHUNK": place.CHUNK}
    types = {"p_counts": "*i32", "p_of_rank": "*i32", "p_cursor": "*i64", "p_slots": "*i64",
             "p_out": "*i64"}  # fmt: skip
    found = [Case("rank_entries", place.rank_entries_kernel, chunks, types=types)]
    for name, sizes in (("count_unused", chunks), ("place", {**tile, "BLOCK": place.BLOCK})):
        kernel = getattr(place, f"{name}_kernel")
        for has_live in (False, True):
            flags = {"HAS_LIVE": has_live, **({} if has_live else {"p_live": None})}
            full = f"{name}{' live' * has_live}"
            found.append(Case(full, kernel, {**sizes, **flags}, types=types))
    return found


def dflash2_cases() -> list[Case]:
    """Return cases at z-lab's shapes: blocks of 8 and 16, 2 taps over groups of 16 channels, 16
    candidates, tables of rank 256. Logits are of the largest vocabulary that SGLang serves."""
    rank, width, chunk = 256, 2**18, {"CHUNK": candidates.CHUNK}
    some = {**chunk, "CHUNKS": candidates.CHUNKS, "HAS_SUMS": True}
    no_sums = {"HAS_SUMS": False, **dict.fromkeys(("p_maxima", "p_sums", "p_temperatures"))}
    found = [
        Case(
            f"largest_of_chunks sums={not no_sums}",
            candidates.largest_of_chunks_kernel,
            {**some, **no_sums},
            types={"p_largest": "*i32"},
            options={"num_warps": 8},
            logits=some["CHUNK"] * some["CHUNKS"],
        )
        for no_sums in (no_sums, {})
    ]
    for k in (16, MOST_CANDIDATES):
        sizes = {"K": k, "TOP": candidates.top(k), "BLOCK": candidates.block(width, k)}
        found.append(
            Case(
                f"candidates {width} k{k}",
                candidates.candidates_kernel,
                {**chunk, **sizes},
                types={"p_largest": "*i32"},
                options={"num_warps": 8},
                logits=width,
            )
        )
    k = 16
    for block in (8, 16):
        for extra in (False, True):
            shape = {"GROUP": 16, "B": block, "K": 2, "BLOCK_G": 16, "HAS_BIAS": extra}
            shape |= {"ROWS": convolve.ROWS, "GROUPS": convolve.GROUPS}
            none = {} if extra else {"p_bias": None}
            name = f"convolve b{block}{' bias' * extra}"
            found.append(Case(name, convolve.convolve_kernel, {**shape, **none}))
            none = {} if extra else dict.fromkeys(NOISE)
            shape = {"K": k, "RANK": rank, "BLOCK_K": k, "BLOCK_R": rank}
            shape |= {"HAS_EDGES": True}
            found.append(
                Case(
                    f"walk b{block} k{k} r{rank}{' noise' * extra}",
                    walk.walk_kernel,
                    {**shape, "HAS_NOISE": extra, **none},
                    types={"p_out": "*i64", "p_logits": "*fp32"},
                )
            )
    return found


def cases() -> dict[str, Case]:
    """All kernels at all published shapes, by name."""
    found = [
        Case(
            f"context_table{' tags' * has_tags}",
            context_table.context_table_kernel,
            {"HAS_TAGS": has_tags, "BLOCK": context_table.BLOCK},
        )
        for has_tags in (False, True)
    ]
    for kept in (False, True):
        with_checkpoints = {"HAS_CHECKPOINTS": kept, **({} if kept else NO_CHECKPOINTS)}
        fold = {**GATED_DELTA, "BLOCK_V": gated_delta_fold.BLOCK_V, **with_checkpoints}
        windows = {"HISTORY": GATED_DELTA["W"] - 1, "BLOCK": gated_delta_fold.WINDOW_BLOCK}
        name, types = " checkpoints" * kept, {"EPS": "fp32"}
        found += [
            Case(f"gated_delta_fold{name}", gated_delta_fold.fold_kernel, fold, types=types),
            Case(
                f"move_windows{name}",
                gated_delta_fold.move_windows_kernel,
                {**windows, **with_checkpoints},
            ),
        ]
    matched = {"LONGEST": text_match.LONGEST_MATCH, "PIECE": text_match.PIECE}
    found.append(Case("find_match", text_match.find_match_kernel, matched))
    # Of a draft without a selector.
    edges = dict.fromkeys(("p_hidden", "p_predecessors", "p_successors"))
    for noisy in (False, True):
        shape = {"K": 16, "RANK": 0, "BLOCK_K": 16, "BLOCK_R": 1, "HAS_EDGES": False}
        none = {} if noisy else dict.fromkeys(NOISE)
        types = {"p_out": "*i64", "p_logits": "*fp32"}
        shape |= {"HAS_NOISE": noisy, **edges, **none}
        found.append(Case(f"walk b16 k16{' noise' * noisy}", walk.walk_kernel, shape, types=types))
    one = {"BLOCK_B": accept.BLOCK}
    found.append(Case("accept", accept.accept_kernel, one, options={"num_warps": 1}))
    found.append(Case("silu_mul", silu_mul.silu_mul_kernel, {"BLOCK": silu_mul.BLOCK}))
    found += [*target_cases(), *place_cases(), *dflash2_cases()]
    drafts = published()
    # No published draft has head dim 256. It is served all the same.
    sizes = (128, 16, None)
    wide = next(
        x for x in drafts if (x.head_dim, x.block_size, x.layers[0].sliding_window) == sizes
    )
    for config in (*drafts, replace(wide, head_dim=256)):
        found += [*attention_cases(config), *layer_cases(config), *step_cases(config)]
    return {case.name: case for case in found}


def resources(case: Case, capability: int) -> dict[str, Any]:
    """A row of the table: of a case on a capability."""
    kernel = case.kernel
    while not isinstance(kernel, JITFunction):
        kernel = kernel.fn
    signature, attributes = {}, {}
    for index, name in enumerate(kernel.arg_names):
        if name in case.constants:
            signature[name] = "constexpr"
            continue
        usual = pointer(name, case.dtype) if name.startswith("p_") else "i32"
        signature[name] = case.types.get(name, usual)
        aligned = name.startswith(("p_", "s_")) or (name == "V" and case.logits)
        if aligned and not kernel.params[index].do_not_specialize:
            # As a launch finds out: tensors begin at, and rows are multiples of, 16 elements, and
            # so are the vocabularies that are served.
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, dict(case.constants), attributes)
    target = GPUTarget("cuda", capability, 32)
    compiled = triton.compile(source, target=target, options=dict(case.options))
    cubin = compiled.asm["cubin"]
    used = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", dump(cubin, "resource-usage")))
    found = {
        "registers": int(used["REG"]),
        "spilled": int(used["STACK"]) + int(used["LOCAL"]),
        "shared": compiled.metadata.shared,
    }
    if case.logits:
        threads = WARP * compiled.metadata.num_warps
        counts = executed(dump(cubin, "sass"), case.turns)
        per_logit = (round(count * threads / case.logits, 1) for count in counts)
        found |= dict(zip(("at_least", "at_most"), per_logit, strict=True))
    return found


def table(capabilities: tuple[int, ...], *names: str) -> dict[str, dict[str, dict[str, Any]]]:
    """Case -> capability -> resources; of cases whose names begin so."""
    return {
        name: {str(c): resources(case, c) for c in capabilities if c >= case.since}
        for name, case in sorted(cases().items())
        if name.startswith(names or ("",))
    }


def as_text(rows: Mapping[str, Mapping[str, Mapping[str, int]]]) -> str:
    """JSON with a line per case."""
    lines = [f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in rows.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


if __name__ == "__main__":
    if sys.argv[1:2] == ["--write"]:
        made = table(CAPABILITIES, *sys.argv[2:])
        kept = {name: row for name, row in json.loads(TABLE.read_text()).items() if name in cases()}
        TABLE.write_text(as_text(dict(sorted({**kept, **made}.items()))))
    else:
        print(as_text(table(tuple(map(int, sys.argv[1:])))))
