"""SGLang's Triton functions for hybrid (Gated DeltaNet) models, replaced by torch with the same side effects.

Everything here takes the name, the arguments and the layouts of what it replaces. A slot index below zero is a padded
row: nothing is read or written for it and its outputs are zero.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from sglang_dflash.core.recurrent import gated_delta as gdn
from sglang_dflash.core.recurrent.replay import block_outputs


def fused_qkvzba_split_reshape_cat_contiguous(
    mixed_qkvz: Tensor,
    mixed_ba: Tensor,
    num_heads_qk: int,
    num_heads_v: int,
    head_qk: int,
    head_v: int,
) -> tuple[Tensor, ...]:
    return gdn.split_projections(mixed_qkvz, mixed_ba, num_heads_qk, num_heads_v, head_qk, head_v)


def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_states: Tensor,
    query_start_loc: Tensor,
    seq_lens_cpu: list[int],
    cache_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    activation: str | None = "silu",
    pad_slot_id: int = -1,
    validate_data: bool = False,
    block_table: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    """Prefill: x `[C, T]` of all sequences -> `[C, T]`, token-major in memory; conv_states `[slots, C, W - 1]` get their last inputs."""
    bounds = query_start_loc.tolist()
    slots = range(len(bounds) - 1) if cache_indices is None else cache_indices.tolist()
    known = [False] * len(slots) if has_initial_state is None else has_initial_state.tolist()
    keep = weight.shape[1] - 1
    tokens = x.T
    out = torch.zeros(tokens.shape, dtype=x.dtype, device=x.device)
    for slot, old, start, end in zip(slots, known, bounds[:-1], bounds[1:], strict=True):
        if slot < 0 or start == end:
            continue
        history = conv_states[slot, :, :keep]
        # Not multiplied by zero: a fresh slot may hold anything.
        history = history if old else torch.zeros_like(history)
        conv, windows = gdn.causal_conv(
            tokens[None, start:end], history[None], weight, bias, activation_name(activation)
        )
        out[start:end] = conv[0].to(x.dtype)
        conv_states[slot, :, :keep] = windows[0, -1].to(conv_states.dtype)
    return out.T


def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: bool | str | None = None,
    cache_seqlens: Tensor | None = None,
    conv_state_indices: Tensor | None = None,
    num_accept_tokens: Tensor | None = None,
    intermediate_conv_window: Tensor | None = None,
    intermediate_state_indices: Tensor | None = None,
    retrieve_next_token: Tensor | None = None,
    retrieve_next_sibling: Tensor | None = None,
    retrieve_parent_token: Tensor | None = None,
    pad_slot_id: int = -1,
    metadata: Any = None,
    validate_data: bool = False,
) -> Tensor:
    """Decode: x `[N, C]` moves conv_state `[slots, C, W - 1]` on. Verify: x `[N, C, T]` leaves it as it is, and
    `intermediate_conv_window[row, t]` `[C, W - 1]` becomes what it would be after token t."""
    refuse(
        "causal_conv1d_update",
        cache_seqlens=cache_seqlens,
        num_accept_tokens=num_accept_tokens,
        tree=retrieve_next_token,
    )
    tokens = x[:, None] if x.ndim == 2 else x.transpose(1, 2)
    slots = torch.arange(len(x)) if conv_state_indices is None else conv_state_indices
    rows, slots = real(slots)
    keep = weight.shape[1] - 1
    conv, windows = gdn.causal_conv(
        tokens[rows], conv_state[slots, :, :keep], weight, bias, activation_name(activation)
    )
    out = torch.zeros(tokens.shape, dtype=x.dtype, device=x.device)
    out[rows] = conv.to(x.dtype)
    if intermediate_conv_window is None:
        conv_state[slots, :, :keep] = windows[:, -1].to(conv_state.dtype)
    else:
        assert intermediate_state_indices is not None
        # Windows overlap in memory where SGLang stores each input once; the same value is then written more than once.
        window_rows = intermediate_state_indices[rows].long()
        intermediate_conv_window[window_rows, : tokens.shape[1]] = windows[:, 1:].to(
            intermediate_conv_window.dtype
        )
    return out[:, 0] if x.ndim == 2 else out.transpose(1, 2)


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
    """Prefill: `[1, T, heads, dim]` -> outputs, nothing, and the float32 states at the chunks' starts `[1, C, HV, V, K]`.

    initial_state `[slots, HV, V, K]` is read, and written unless told not to, at `initial_state_indices`.
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
    """Decode: mixed_qkv `[N, 2 H K + HV V]` into out `[N, 1, HV, V]`; initial_state `[slots, HV, V, K]` moves on."""
    heads, dim, key_dim = initial_state.shape[-3:]
    keys = (mixed_qkv.shape[1] - heads * dim) // 2
    q, k, v = mixed_qkv[:, None].split([keys, keys, heads * dim], -1)
    q, k, v = (
        q.unflatten(-1, (-1, key_dim)),
        k.unflatten(-1, (-1, key_dim)),
        v.unflatten(-1, (-1, dim)),
    )
    g, beta = gdn.gates(A_log, a[:, None], dt_bias, b[:, None])
    rows, slots = real(ssm_state_indices)
    q, k = gdn.per_value_head(q[rows], k[rows], heads, scale, use_qk_l2norm_in_kernel)
    outputs, states = gdn.recurrent(q, k, v[rows], g[rows], beta[rows], initial_state[slots])
    out.zero_()
    out[rows] = outputs.to(out.dtype)
    initial_state[slots] = states[-1].to(initial_state.dtype)
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
    """Verify, and decode that is not packed: q, k, v `[B, T, heads, dim]`, a and b `[B * T, HV]` -> `[B, T, HV, V]`.

    `intermediate_states_buffer[row, t]` `[HV, V, K]` becomes the state after a sequence's token t; the state itself
    (initial_state_source `[slots, HV, V, K]`) moves on unless told not to.
    """
    refuse(
        "fused_sigmoid_gating_delta_rule_update",
        is_kda=is_kda or None,
        tree=retrieve_parent_token,
        cache_ring=cache_ring or None,
    )
    shape, heads, key_dim = v.shape, v.shape[2], k.shape[3]
    g, beta = gdn.gates(
        A_log,
        a.reshape(-1, heads),
        dt_bias,
        b.reshape(-1, heads),
        softplus_beta,
        softplus_threshold,
    )
    scale = key_dim**-0.5 if scale is None else scale
    q, k = gdn.per_value_head(
        q.flatten(0, 1), k.flatten(0, 1), heads, scale, use_qk_l2norm_in_kernel
    )
    bounds = list(range(0, len(g) + 1, shape[1])) if cu_seqlens is None else cu_seqlens.tolist()
    v, out = v.flatten(0, 1), torch.zeros(len(g), *shape[2:], dtype=v.dtype, device=v.device)
    for first, count, length in equal_runs(bounds):
        of_run = slice(bounds[first], bounds[first] + count * length)
        rows, slots = real(initial_state_indices[first : first + count])
        run_q, run_k, run_v, run_g, run_beta = (
            x[of_run].unflatten(0, (count, length))[rows] for x in (q, k, v, g, beta)
        )
        every, given = (
            intermediate_states_buffer is not None,
            (run_q, run_k, run_v, run_g, run_beta, initial_state_source[slots]),
        )
        if disable_state_update and not every:
            out[of_run].unflatten(0, (count, length))[rows] = block_outputs(*given).to(
                out.dtype
            )
            continue
        outputs, states = gdn.recurrent(*given, every)
        out[of_run].unflatten(0, (count, length))[rows] = outputs.to(out.dtype)
        if intermediate_states_buffer is not None:
            assert intermediate_state_indices is not None
            kept = intermediate_state_indices[first : first + count][rows].long()
            intermediate_states_buffer[kept, :length] = states.transpose(0, 1).to(
                intermediate_states_buffer.dtype
            )
        if not disable_state_update:
            initial_state_source[slots] = states[-1].to(initial_state_source.dtype)
    return out.unflatten(0, shape[:2])


def rms_norm_forward(self: Any, x: Tensor, z: Tensor | None = None) -> Tensor:
    """The norm after the recurrence, gated by z."""
    return gdn.gated_rms_norm(
        x, self.weight, z, self.eps, self.group_size, self.norm_before_gate, self.activation
    )


def fused_sigmoid_mul(
    attn_output: Tensor, gate: Tensor, inplace: bool = False, quant: bool = False
) -> Tensor:
    """attn_output `[T, H * D]` times the sigmoid of a gate of as many elements."""
    refuse("fused_sigmoid_mul", quant=quant or None)
    gated = (attn_output.float() * gate.reshape(attn_output.shape).float().sigmoid()).to(
        attn_output.dtype
    )
    return attn_output.copy_(gated) if inplace else gated


def fused_gate_sigmoid_mul(
    hidden_states: Tensor, gate_weight: Tensor, shared_output: Tensor
) -> Tensor:
    """Models with experts: the shared expert's `[T, hidden]` times a gate per token, from gate_weight `[hidden]`."""
    gate = (hidden_states.float() * gate_weight.float()).sum(-1, keepdim=True).sigmoid()
    return (gate * shared_output.float()).to(shared_output.dtype)


def fused_gate_sigmoid_mul_add(
    hidden_states: Tensor, gate_weight: Tensor, shared_output: Tensor, final_hidden_states: Tensor
) -> None:
    """The same, added to what the routed experts gave."""
    final_hidden_states += fused_gate_sigmoid_mul(hidden_states, gate_weight, shared_output)


def scatter_mamba_states_after_mtp_verify(
    mamba_caches: Any,
    state_indices_tensor: Tensor,
    last_correct_step_indices: Tensor,
    mamba_track_indices: Tensor | None,
    mamba_steps_to_track: Tensor | None,
    src_indices_raw: Tensor | None = None,
) -> None:
    """Commit after verify: of all layers, the snapshot of a request's last accepted token becomes its state, and that of
    a track boundary it crossed becomes a prefix-cache checkpoint."""
    pairs = [(mamba_caches.temporal, mamba_caches.intermediate_ssm)]
    pairs += zip(mamba_caches.conv, mamba_caches.intermediate_conv_window, strict=True)
    targets = [(state_indices_tensor, last_correct_step_indices)]
    if mamba_track_indices is not None:
        assert mamba_steps_to_track is not None
        targets.append((mamba_track_indices, mamba_steps_to_track))
    for slots, steps in targets:
        source = torch.arange(len(steps)) if src_indices_raw is None else src_indices_raw.long()
        wanted = (steps >= 0) & (slots >= 0)
        source, slots, steps = source[wanted], slots[wanted].long(), steps[wanted].long()
        for states, snapshots in pairs:
            if states.numel():
                states[:, slots] = snapshots[:, source, steps]


def track_mamba_states_if_needed(
    conv_states: Tensor,
    ssm_states: Tensor,
    cache_indices: Tensor,
    mamba_track_mask: Tensor,
    mamba_track_indices: Tensor,
    batch_size: int,
    check_freed_slots: bool = False,
) -> None:
    """Decode at a track boundary: one layer's states `[slots, ...]` of the masked rows are copied to their checkpoint slots."""
    track_mamba_states_all_layers(
        conv_states[None],
        ssm_states[None],
        cache_indices,
        mamba_track_mask,
        mamba_track_indices,
        batch_size,
        check_freed_slots,
    )


def track_mamba_states_all_layers(
    conv_states_pool: Tensor,
    ssm_states_pool: Tensor,
    cache_indices: Tensor,
    mamba_track_mask: Tensor,
    mamba_track_indices: Tensor,
    batch_size: int,
    check_freed_slots: bool = False,
) -> None:
    """The same for all layers at once, `[layers, slots, ...]`."""
    source, target = cache_indices[:batch_size].long(), mamba_track_indices[:batch_size].long()
    wanted = mamba_track_mask[:batch_size].bool() & (source >= 0) & (target >= 0)
    if wanted.any():
        for pool in (conv_states_pool, ssm_states_pool):
            pool[:, target[wanted]] = pool[:, source[wanted]]


def activation_name(activation: bool | str | None) -> str | None:
    return ("silu" if activation else None) if isinstance(activation, bool) else activation


def real(slots: Tensor) -> tuple[Tensor, Tensor]:
    """int64 rows of a batch that are no padding, and their slots."""
    rows = (slots >= 0).nonzero()[:, 0]
    return rows, slots[rows].long()


def equal_runs(bounds: list[int]) -> Iterator[tuple[int, int, int]]:
    """Neighbouring sequences of equal length, which can be computed as one batch: first sequence, how many, length."""
    lengths = [end - start for start, end in itertools.pairwise(bounds)]
    first = 0
    for i in range(1, len(lengths) + 1):
        if i == len(lengths) or lengths[i] != lengths[first]:
            if lengths[first]:
                yield first, i - first, lengths[first]
            first = i


def refuse(function: str, **unserved: object) -> None:
    """Raise for arguments of features that no configuration of this platform can ask for."""
    asked = sorted(name for name, value in unserved.items() if value is not None)
    if asked:
        raise NotImplementedError(
            f"{function}: {', '.join(asked)} is not served on the plain-CPU platform"
        )


_OPS = "sglang.kernels.ops."
REPLACEMENTS: dict[str, Callable[..., Any]] = {
    _OPS
    + "attention.triton_gdn_fused_proj.fused_qkvzba_split_reshape_cat_contiguous": fused_qkvzba_split_reshape_cat_contiguous,
    _OPS + "mamba.causal_conv1d_triton.causal_conv1d_fn": causal_conv1d_fn,
    _OPS + "mamba.causal_conv1d_triton.causal_conv1d_update": causal_conv1d_update,
    _OPS + "attention.linear.fused_gdn_gating.fused_gdn_gating": fused_gdn_gating,
    _OPS + "attention.fla.chunk.chunk_gated_delta_rule": chunk_gated_delta_rule,
    _OPS
    + "attention.fla.fused_recurrent.fused_recurrent_gated_delta_rule_packed_decode": fused_recurrent_gated_delta_rule_packed_decode,
    _OPS
    + "attention.linear.fused_sigmoid_gating_recurrent.fused_sigmoid_gating_delta_rule_update": fused_sigmoid_gating_delta_rule_update,
    _OPS + "attention.fla.layernorm_gated.RMSNorm.forward": rms_norm_forward,
    _OPS + "elementwise.elementwise.fused_sigmoid_mul": fused_sigmoid_mul,
    _OPS + "elementwise.elementwise.fused_gate_sigmoid_mul": fused_gate_sigmoid_mul,
    _OPS + "elementwise.elementwise.fused_gate_sigmoid_mul_add": fused_gate_sigmoid_mul_add,
    _OPS
    + "mamba.mamba_state_scatter_triton.scatter_mamba_states_after_mtp_verify": scatter_mamba_states_after_mtp_verify,
    _OPS
    + "mamba.mamba_state_scatter_triton.track_mamba_states_if_needed": track_mamba_states_if_needed,
    _OPS
    + "mamba.mamba_state_scatter_triton.track_mamba_states_all_layers": track_mamba_states_all_layers,
}


def register_gdn_hooks() -> None:
    """Register all replacements; a target that does not resolve is only logged by SGLang, so a test resolves them all."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for target, replacement in REPLACEMENTS.items():
        HookRegistry.register(target, replacement, HookType.REPLACE)
