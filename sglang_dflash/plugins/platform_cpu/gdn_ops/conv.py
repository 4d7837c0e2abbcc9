"""Causal convolution before the recurrence: prefill, decode and verify."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sglang_dflash.drafting.recurrent import gated_delta as gdn
from sglang_dflash.plugins.platform_cpu.gdn_ops import real_rows, refuse


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
    """Prefill: x `[C, T]` of all sequences -> `[C, T]`, token-major in memory. Products are
    float32, as in SGLang's compiled kernel.

    A sequence's last inputs are written to its slot of conv_states `[slots, C, W - 1]`.
    """
    bounds = query_start_loc.tolist()
    slots = range(len(bounds) - 1) if cache_indices is None else cache_indices.tolist()
    is_continued = [False] * len(slots) if has_initial_state is None else has_initial_state.tolist()
    window_size = weight.shape[1] - 1
    tokens = x.T
    out = torch.zeros(tokens.shape, dtype=x.dtype, device=x.device)
    for slot, old, start, end in zip(slots, is_continued, bounds[:-1], bounds[1:], strict=True):
        if slot < 0 or start == end:
            continue
        history = conv_states[slot, :, :window_size]
        # Not multiplied by zero: a fresh slot may hold anything.
        history = history if old else torch.zeros_like(history)
        conv, windows = gdn.causal_conv(
            tokens[None, start:end].float(),
            history[None],
            weight.float(),
            bias,
            activation_name(activation),
        )
        out[start:end] = conv[0].to(x.dtype)
        conv_states[slot, :, :window_size] = windows[0, -1].to(conv_states.dtype)
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
    """Decode: x `[N, C]` -> `[N, C]`, and conv_state `[slots, C, W - 1]` advances by one token.

    Verify: x `[N, C, T]` -> `[N, C, T]`. conv_state stays as it is;
    `intermediate_conv_window[row, t]` `[C, W - 1]` becomes what it would be after token t.

    Raises:
        NotImplementedError: an argument of tree drafts or of the speculative layout that is unused.
        ValueError: snapshots without the rows to write them to.
    """
    refuse(
        "causal_conv1d_update",
        cache_seqlens=cache_seqlens,
        num_accept_tokens=num_accept_tokens,
        tree=retrieve_next_token,
    )
    tokens = x[:, None] if x.ndim == 2 else x.transpose(1, 2)
    slots = torch.arange(len(x)) if conv_state_indices is None else conv_state_indices
    rows, slots = real_rows(slots)
    window_size = weight.shape[1] - 1
    conv, windows = gdn.causal_conv(
        tokens[rows], conv_state[slots, :, :window_size], weight, bias, activation_name(activation)
    )
    out = torch.zeros(tokens.shape, dtype=x.dtype, device=x.device)
    out[rows] = conv.to(x.dtype)
    if intermediate_conv_window is None:
        conv_state[slots, :, :window_size] = windows[:, -1].to(conv_state.dtype)
    elif intermediate_state_indices is None:
        raise ValueError("intermediate_conv_window needs intermediate_state_indices")
    else:
        # SGLang may store each input once, so that windows overlap in memory: the same value is
        # then written more than once.
        window_rows = intermediate_state_indices[rows].long()
        intermediate_conv_window[window_rows, : tokens.shape[1]] = windows[:, 1:].to(
            intermediate_conv_window.dtype
        )
    return out[:, 0] if x.ndim == 2 else out.transpose(1, 2)


def activation_name(activation: bool | str | None) -> str | None:
    return ("silu" if activation else None) if isinstance(activation, bool) else activation
