"""The gated delta rule: gates, prefill, decode and verify."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from sglang_dflash.drafting.recurrent import gated_delta as gdn
from sglang_dflash.drafting.recurrent import replay
from sglang_dflash.plugins.platform_cpu.gdn_ops import real_rows, refuse


def fused_gdn_gating(
    A_log: Tensor, a: Tensor, b: Tensor, dt_bias: Tensor, beta: float = 1.0, threshold: float = 20.0
) -> tuple[Tensor, Tensor]:
    """a, b `[T, HV]` -> log decay and write strength, float32 `[1, T, HV]`."""
    decay, strength = gdn.gates(A_log, a, dt_bias, b, beta, threshold)
    return decay[None], strength[None]


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    initial_state_indices: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    head_first: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    inplace_update: bool = True,
) -> tuple[Tensor, None, Tensor]:
    """Prefill: q, k `[1, T, H, K]`, v `[1, T, HV, V]`, g and beta `[1, T, HV]`.

    initial_state `[slots, HV, V, K]` is read at `initial_state_indices`, and written there if
    `inplace_update`. Returns outputs `[1, T, HV, V]`, None, and the states at the start of every
    chunk, float32 `[1, chunks, HV, V, K]`.
    """
    refuse(
        "chunk_gated_delta_rule",
        head_first=head_first or None,
        batch=None if len(q) == 1 else len(q),
    )
    heads, dim, key_dim = v.shape[2], v.shape[3], k.shape[3]
    q, k = gdn.per_value_head(
        q[0], k[0], heads, key_dim**-0.5 if scale is None else scale, use_qk_l2norm_in_kernel
    )
    bounds = [0, v.shape[1]] if cu_seqlens is None else cu_seqlens.tolist()
    slots = (
        range(len(bounds) - 1) if initial_state_indices is None else initial_state_indices.tolist()
    )
    out, starts = torch.zeros_like(v, memory_format=torch.contiguous_format), []
    for slot, start, end in zip(slots, bounds[:-1], bounds[1:], strict=True):
        span = slice(start, end)
        if slot < 0 or start == end:
            # Later sequences are found by counting chunks.
            starts.append(torch.zeros(-(-(end - start) // gdn.CHUNK), heads, dim, key_dim))
            continue
        state = torch.zeros(heads, dim, key_dim) if initial_state is None else initial_state[slot]
        outputs, state, chunks = gdn.chunked(
            q[span], k[span], v[0, span], g[0, span], beta[0, span], state
        )
        out[0, span] = outputs.to(v.dtype)
        starts.append(chunks)
        if inplace_update and initial_state is not None:
            initial_state[slot] = state.to(initial_state.dtype)
    return out, None, torch.cat(starts)[None]


def fused_recurrent_gated_delta_rule_packed_decode(
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    scale: float,
    initial_state: Tensor,
    out: Tensor,
    ssm_state_indices: Tensor,
    use_qk_l2norm_in_kernel: bool = False,
) -> tuple[Tensor, Tensor]:
    """Decode: mixed_qkv `[N, 2 H K + HV V]` into out `[N, 1, HV, V]`.

    initial_state `[slots, HV, V, K]` advances by one token.
    """
    heads, dim, key_dim = initial_state.shape[-3:]
    keys = (mixed_qkv.shape[1] - heads * dim) // 2
    q, k, v = mixed_qkv.split([keys, keys, heads * dim], -1)
    q, k = (x.unflatten(-1, (-1, key_dim)) for x in (q, k))
    q, k = gdn.per_value_head(q, k, heads, scale, use_qk_l2norm_in_kernel)
    inputs = q, k, v.unflatten(-1, (-1, dim)), *gdn.gates(A_log, a, dt_bias, b)
    bounds = list(range(len(v) + 1))
    out.zero_()
    _run(inputs, bounds, initial_state, ssm_state_indices, out[:, 0], None, None, update=True)
    return out, initial_state


def fused_sigmoid_gating_delta_rule_update(
    A_log: Tensor,
    a: Tensor,
    dt_bias: Tensor,
    softplus_beta: float,
    softplus_threshold: float,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    b: Tensor,
    initial_state_source: Tensor,
    initial_state_indices: Tensor,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    is_kda: bool = False,
    lower_bound: float | None = None,
    disable_state_update: bool = False,
    intermediate_states_buffer: Tensor | None = None,
    intermediate_state_indices: Tensor | None = None,
    cache_steps: int | None = None,
    retrieve_parent_token: Tensor | None = None,
    cache_ring: bool = False,
    replayssm_rawv: Tensor | None = None,
    replayssm_rawk: Tensor | None = None,
    replayssm_g: Tensor | None = None,
    replayssm_beta: Tensor | None = None,
    match_cutedsl_decode: bool = False,
) -> Tensor:
    """Verify, and decode that is not packed: q, k `[B, T, H, K]`, v `[B, T, HV, V]`.

    a and b are `[B * T, HV]`; returns `[B, T, HV, V]`. `intermediate_states_buffer[row, t]`
    `[HV, V, K]` becomes the state after a sequence's token t. The state itself
    (initial_state_source `[slots, HV, V, K]`) advances unless `disable_state_update`. Raises
    NotImplementedError for KDA, tree drafts and SGLang's ring of inputs.
    """
    refuse(
        "fused_sigmoid_gating_delta_rule_update",
        is_kda=is_kda or None,
        tree=retrieve_parent_token,
        cache_ring=cache_ring or None,
    )
    if intermediate_states_buffer is not None and intermediate_state_indices is None:
        raise ValueError("intermediate_states_buffer needs intermediate_state_indices")
    shape, heads = v.shape, v.shape[2]
    a, b = a.reshape(-1, heads), b.reshape(-1, heads)
    g, beta = gdn.gates(A_log, a, dt_bias, b, softplus_beta, softplus_threshold)
    scale = k.shape[3] ** -0.5 if scale is None else scale
    q, k, v = q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)
    q, k = gdn.per_value_head(q, k, heads, scale, use_qk_l2norm_in_kernel)
    inputs, pool = (q, k, v, g, beta), initial_state_source
    bounds = list(range(0, len(g) + 1, shape[1])) if cu_seqlens is None else cu_seqlens.tolist()
    out = torch.zeros(len(g), *shape[2:], dtype=v.dtype, device=v.device)
    indices, rows = initial_state_indices, intermediate_state_indices
    snapshots = intermediate_states_buffer
    _run(inputs, bounds, pool, indices, out, snapshots, rows, update=not disable_state_update)
    return out.unflatten(0, shape[:2])


def _run(
    inputs: Iterable[Tensor],
    bounds: list[int],
    pool: Tensor,
    indices: Tensor,
    out: Tensor,
    snapshots: Tensor | None,
    snapshot_rows: Tensor | None,
    update: bool,
) -> None:
    """Fill `out` `[T, HV, V]` sequence by sequence, equal ones as one batch. `inputs` are q, k
    `[T, HV, K]`, v `[T, HV, V]`, and g, beta `[T, HV]`.

    With `snapshots`, the state after every token goes to their `snapshot_rows`. With `update`, the
    states of `pool` at `indices` advance.
    """
    for first, count, length in equal_runs(bounds):
        tokens = slice(bounds[first], bounds[first] + count * length)
        sequences = slice(first, first + count)
        rows, slots = real_rows(indices[sequences])
        q, k, v, g, beta = (x[tokens].unflatten(0, (count, length))[rows] for x in inputs)
        run_out = out[tokens].unflatten(0, (count, length))
        if snapshots is None and not update:
            run_out[rows] = replay.block_outputs(q, k, v, g, beta, pool[slots]).to(out.dtype)
            continue
        is_every = snapshots is not None
        outputs, after = gdn.recurrent(q, k, v, g, beta, pool[slots], is_every)
        run_out[rows] = outputs.to(out.dtype)
        if snapshots is not None and snapshot_rows is not None:
            kept_rows = snapshot_rows[sequences][rows].long()
            snapshots[kept_rows, :length] = after.transpose(0, 1).to(snapshots.dtype)
        if update:
            pool[slots] = after[-1].to(pool.dtype)


def equal_runs(bounds: list[int]) -> Iterator[tuple[int, int, int]]:
    """Yield runs of neighboring sequences of equal length: first sequence, count, length.

    A run can be computed as one batch. Empty sequences are left out.
    """
    lengths = [end - start for start, end in itertools.pairwise(bounds)]
    first = 0
    for i in range(1, len(lengths) + 1):
        if i == len(lengths) or lengths[i] != lengths[first]:
            if lengths[first]:
                yield first, i - first, lengths[first]
            first = i
