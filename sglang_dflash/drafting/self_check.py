"""The drafter's operations against torch's, on random inputs: a few milliseconds at start-up that
find a kernel which this machine gets wrong. `recording_check` compares recorded steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from sglang_dflash.checkpoint.draft_config import WHOLE_CONTEXT
from sglang_dflash.common.errors import ConfigError
from sglang_dflash.drafting.acceptance import accept
from sglang_dflash.drafting.attention.paged import PagedAttention
from sglang_dflash.drafting.attention.reference import TorchAttention
from sglang_dflash.drafting.attention.table import ContextTable, RequestSlots
from sglang_dflash.drafting.draft_counters import DraftCounters
from sglang_dflash.drafting.draft_source import CLASSES, DraftsBySource, DraftSource
from sglang_dflash.drafting.groups import KVGroup
from sglang_dflash.drafting.kv import Tags, store_
from sglang_dflash.drafting.model import DraftModel
from sglang_dflash.drafting.ops import TorchOps, context_table
from sglang_dflash.drafting.random_inputs import Cases, RandomInputs
from sglang_dflash.drafting.recurrent import replay
from sglang_dflash.drafting.recurrent.replay import Moves, RecurrentLayers, VerifyInputs
from sglang_dflash.drafting.target_cases import penalties, samples
from sglang_dflash.drafting.text_match import LONGEST_MATCH, SHORTEST_MATCH

# Largest difference, as a share of the largest value of the torch result.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}
REQUESTS, CONTEXT = 3, 40
Fold = Callable[[RecurrentLayers, Tensor, VerifyInputs, Moves], None]
MoveWindows = Callable[[Tensor, Tensor, Moves], None]


class SelfCheckFailed(ConfigError):
    """An operation gives another result than torch, or a recorded step than an eager one."""


def check_ops(model: DraftModel, draft_block: int, verify_block: int) -> list[str]:
    """Compare the model's operations with torch's, at its shapes and with its weights.

    Args:
        draft_block: tokens of the block that the draft fills.
        verify_block: tokens of the block that the target verifies, at most.

    Returns:
        The names of the operations that were compared; none if they are torch's.

    Raises:
        SelfCheckFailed: one differs; the message names it, shape, difference and what helps.
    """
    if type(model.ops) is TorchOps:
        return []
    cases, twin = op_cases(model, draft_block, verify_block), TorchOps()
    for name, run in cases.items():
        for actual, expected in zip(run(model.ops), run(twin), strict=True):
            _compare(name, actual, expected)
    return list(cases)


def check_attention(model: DraftModel, draft_block: int, group: KVGroup, most: int) -> None:
    """Compare draft attention with torch's, for every layer of a group, with dead entries.

    Args:
        most: requests of the largest batch that the attention was made for: its workspace, or
            scratch entries, hold no more.
        group: its cache is empty, but for what the attention keeps at its end, and has zeros again
            afterwards.

    Raises:
        SelfCheckFailed: see `check_ops`.
    """
    draw, layer_group, kv = RandomInputs(model), group.layer_group, group.cache.kv
    requests = min(REQUESTS, most)
    context = min(CONTEXT, group.cache.num_entries)
    everything = torch.arange(context, device=draw.device)
    store_(kv, everything, draw.floats(context, *kv.shape[1:]))
    seq_lens = draw.ints(context // 2, context + 1, requests)
    columns = everything[: layer_group.reach.tokens_read(context)].expand(requests, -1)
    live = columns < seq_lens[:, None]
    dead = columns % 7 == 3
    if isinstance(group.attention, PagedAttention):
        # It leaves dead entries out instead of masking them, and then sees farther inside of a
        # sliding window: only the oldest one is.
        dead = (columns == 0) & group.cache.has_holes
    live &= ~dead
    table = ContextTable(columns.where(live, -1).int(), seq_lens)
    layer: Any = model.layers[0]
    q = draw.floats(requests, draft_block, layer.heads, layer.head_dim)
    k, v = (draw.floats(requests, draft_block, layer.kv_heads, layer.head_dim) for _ in range(2))
    expected = TorchAttention(layer_group.attentions, draft_block)
    try:
        for backend in (group.attention, expected):
            backend.prepare(kv, table)
        for i, number in enumerate(layer_group.numbers):
            name = f"attention of layer {number} ({type(group.attention).__name__})"
            _compare(name, group.attention.attend(i, q, k, v), expected.attend(i, q, k, v))
    finally:
        kv.zero_()


def check_replay(fold: Fold, move_windows: MoveWindows, conv: Tensor, states: Tensor) -> None:
    """Compare the replay of Gated DeltaNet layers with torch's, for a random layer, at the shapes
    of a target's state pool, with a checkpoint. A wrong state changes the target's tokens.

    Args:
        conv: `[L, S, C, W - 1]`, and
        states: `[L, S, HV, V, K]`, of the pool. Their values are not read.

    Raises:
        SelfCheckFailed: see `check_ops`.
    """
    draw, block = RandomInputs(conv), 4
    value_heads, value_dim, key_dim = states.shape[2:]
    channels, history = conv.shape[2:]
    layers = RecurrentLayers(
        conv_weight=draw.floats(1, channels, history + 1),
        conv_bias=None,
        activation="silu",
        a_log=draw.floats(1, value_heads).float(),
        dt_bias=draw.floats(1, value_heads),
        key_heads=(channels - value_heads * value_dim) // (2 * key_dim),
        value_heads=value_heads,
        key_dim=key_dim,
        value_dim=value_dim,
    )
    # As SGLang lays them out, each window begins one input after the one before.
    inputs = draw.floats(1, 2, channels, block + history)
    windows = inputs.unfold(3, history, 1)[:, :, :, 1:].permute(0, 1, 3, 2, 4)
    gates = draw.floats(2, 1, 2, block, value_heads)
    verify_inputs = VerifyInputs(inputs[..., :history], windows[..., -1], *gates)
    rows, lengths = torch.arange(2, device=draw.device), draw.ints(2, block, 2)
    checkpoints = torch.where(rows > 0, 4, -1)
    moves = Moves(rows, rows, rows + 2, lengths, checkpoints, torch.ones_like(rows))
    before = draw.floats(1, 5, *states.shape[2:]).to(states.dtype)
    pool = draw.floats(1, 5, channels, history)
    results = []
    for run, move in ((fold, move_windows), (replay.fold_, replay.move_windows_)):
        after, moved = before.clone(), pool.clone()
        run(layers, after, verify_inputs, moves)
        move(moved, windows, moves)
        results.append((after, moved))
    (after, moved), (states_of_torch, windows_of_torch) = results
    _compare("replay of recurrent states", after, states_of_torch, draw.dtype)
    _compare("windows of replay", moved, windows_of_torch)


def _used(lengths: Tensor, followed: Tensor) -> Sequence[Tensor]:
    """Return matches and what followed them, zeros where the match is too short to be used."""
    is_match = lengths >= SHORTEST_MATCH
    return lengths.where(is_match, 0), followed.where(is_match[:, None], 0)


def op_cases(model: DraftModel, block: int, verify_block: int) -> Cases:
    """The operations of a step, and those of the head; `check_ops` has the arguments."""
    of_head = model.head.check_cases(RandomInputs(model), REQUESTS, block)
    of_lookup = _lookup_cases(model, block, verify_block)
    return _step_cases(model, block, verify_block) | of_lookup | of_head


def _step_cases(model: DraftModel, block: int, verify_block: int) -> Cases:
    """The operations of a draft with any head. Each run has copies: operations may overwrite."""
    config, draw = model.config, RandomInputs(model)
    layers = cast(Sequence[Any], model.layers)
    layer, shape, eps = layers[0], (REQUESTS, block), config.rms_norm_eps
    x, residual = (draw.floats(*shape, config.hidden_size) for _ in range(2))
    qkv = draw.floats(*shape, (layer.heads + 2 * layer.kv_heads) * layer.head_dim)
    weights, rotary = (layer.q_norm.weight, layer.k_norm.weight), model.rotary
    gate_up = draw.floats(*shape, layer.gate_up_proj.out_features)
    positions, of_context = draw.ints(0, 4096, *shape), draw.ints(0, 4096, CONTEXT)
    before = draw.floats(2 * CONTEXT, *model.kv_shape)
    kv, entries = draw.floats(CONTEXT, *model.kv_shape), torch.arange(CONTEXT) + 5
    norms = torch.stack([each.k_norm.weight for each in layers])
    slots = draw.ints(0, 2 * CONTEXT, REQUESTS + 1, CONTEXT).int()
    rows, seq_lens = torch.arange(REQUESTS) + 1, draw.ints(1, CONTEXT, REQUESTS)
    requests = RequestSlots(slots, rows.to(draw.device), seq_lens, CONTEXT)
    entry_of = draw.ints(0, CONTEXT, 2 * CONTEXT).int()
    owner = draw.ints(0, 2 * CONTEXT, CONTEXT + 1).int()
    bonus = draw.ints(0, 4096, REQUESTS)
    drafts, target = (draw.ints(0, 2, REQUESTS, verify_block) for _ in range(2))

    def qk_norm_rope(ops: TorchOps) -> Sequence[Tensor]:
        rotation = ops.rotation(rotary, positions, draw.dtype)
        return ops.qk_norm_rope(qkv.clone(), *weights, rotation, layer.heads, eps)

    def write_context(ops: TorchOps) -> Sequence[Tensor]:
        cache, places = before.clone(), entries.to(draw.device)
        ops.write_context(cache, kv.clone(), places, of_context, norms, rotary, eps)
        return (cache[:-1],)

    def find_context(ops: TorchOps) -> Sequence[Tensor]:
        in_use = torch.zeros(CONTEXT + 1, dtype=torch.bool, device=draw.device)
        tags = Tags(entry_of, owner, in_use)
        return context_table(ops, requests, WHOLE_CONTEXT, tags).entries, in_use

    cases: Cases = {
        "add_rms_norm": lambda ops: ops.add_rms_norm(
            x.clone(), residual.clone(), layer.input_layernorm.weight, eps
        ),
        "qk_norm_rope": qk_norm_rope,
        "silu_mul": lambda ops: (ops.silu_mul(gate_up.clone()),),
        "write_context": write_context,
        "fill_context_table": find_context,
        "place_in_ring": partial(_places, draw.ints(0, 2, CONTEXT + 1) > 0),
        "prepare_block": lambda ops: ops.prepare_block(
            bonus, seq_lens, block, config.mask_token_id
        ),
        "penalize": penalties(draw, seq_lens),
        "sample": samples(draw, seq_lens),
        "accept": lambda ops: ops.accept(drafts, target),
    }
    return cases


def _places(in_use: Tensor, ops: TorchOps) -> Sequence[Tensor]:
    """Entries of a ring, `in_use` bool `[CONTEXT + 1]`, for tokens of which some are dead and more
    are live than a share; then for tokens of a prompt."""
    slots = torch.arange(0, 2 * CONTEXT, 2, device=in_use.device)
    results = []
    for live, share in ((slots % 3 > 0, 9), (None, None)):
        entry_of, owner = (torch.full_like(x, -1).int() for x in (slots.repeat(2), in_use.long()))
        tags, cursor = Tags(entry_of, owner, in_use.clone()), slots[CONTEXT // 4, None].clone()
        placed = ops.place_in_ring(tags, cursor, slots, live, share)
        results += [placed, *tags, cursor]
    return results


def _lookup_cases(model: DraftModel, block: int, verify_block: int) -> Cases:
    """The operations of lookup."""
    draw, positions = RandomInputs(model), verify_block - 1
    rows, seq_lens = draw.ints(0, REQUESTS, REQUESTS), draw.ints(1, CONTEXT, REQUESTS)
    texts = draw.ints(0, 3, REQUESTS, 2 * CONTEXT).int()
    requests = RequestSlots(texts, rows, seq_lens, CONTEXT)
    drafted, followed = draw.ints(0, 2, REQUESTS, block), draw.ints(-1, 2, REQUESTS, positions)
    lengths, likeliest = draw.ints(0, LONGEST_MATCH + 1, REQUESTS), draw.ints(0, 2, REQUESTS, block)
    target, looks_up = draw.ints(0, 2, REQUESTS, verify_block), draw.ints(0, 2, REQUESTS) > 0
    of_both = draw.ints(0, 2, 2, REQUESTS, positions)
    by_source = DraftsBySource(of_both, draw.ints(0, CLASSES, REQUESTS), looks_up)
    accepted = accept(torch.cat((target[:, :1], of_both[0]), 1), target)
    shares = draw.ints(1, 9, 2, CLASSES + 1, positions) / 8
    totals = 40 * torch.stack((torch.ones_like(shares), shares))

    def source() -> DraftSource:
        draft_source = DraftSource(
            verify_block, model.config.vocab_size, DraftCounters(draw.device)
        )
        draft_source.totals.copy_(totals)
        return draft_source

    def choose(ops: TorchOps) -> Sequence[Tensor]:
        chosen, drafts = ops.choose_source(
            source(), drafted, likeliest, lengths, followed, verify_block
        )
        return chosen, *drafts

    def learn(ops: TorchOps) -> Sequence[Tensor]:
        learned = source()
        ops.learn_source(learned, by_source, accepted)
        return learned.totals, learned.counts

    return {
        "find_match": lambda ops: _used(
            *ops.find_match(drafted[:, 0].contiguous(), texts, requests, positions)
        ),
        "choose_source": choose,
        "learn_source": learn,
    }


def _compare(
    name: str, actual: Any, expected: Tensor, computed_in: torch.dtype | None = None
) -> None:
    """Raise SelfCheckFailed if the two differ by more than `TOLERANCE`; integers by anything."""
    allowed = TOLERANCE.get(computed_in or expected.dtype, 0.0)
    difference = (actual.double() - expected.double()).abs().max().item()
    scale = expected.double().abs().max().item() if allowed else 1.0
    # A NaN fails: it is not below anything.
    if actual.shape == expected.shape and difference <= allowed * scale:
        return
    dtype = str(expected.dtype).removeprefix("torch.")
    raise failed(
        f"{name} {list(expected.shape)} {dtype} on {expected.device.type}",
        f"it differs from torch by {difference:.3g} of {scale:.3g} ({allowed:g} of it is allowed)",
    )


def failed(check: str, problem: str) -> SelfCheckFailed:
    return SelfCheckFailed(
        f"self-check: {check}",
        required=f"{problem}; serve with {{worker}} builtin, and report it; {{self_check}} off "
        "starts anyway",
    )
