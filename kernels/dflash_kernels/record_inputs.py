"""Record what a Gated DeltaNet layer's verify forward overwrites, for replay: one launch per layer.
Names as in `gated_delta_fold`.

Letters in shapes: R requests, S state slots, B block positions, HV value heads, C channels, W
width of the convolution.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dflash_kernels.traffic import Traffic

BLOCK = 1024


@triton.jit
def record_inputs_kernel(
    p_kept_a, p_kept_b, p_window, p_a, p_b, p_conv, p_slots,
    s_kept_r, s_kept_t, s_window_r, s_window_c, s_window_w, s_a, s_b,
    s_conv_s, s_conv_c, s_conv_w, TAPS,
    B: tl.constexpr, HV: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per request and BLOCK elements of its window and of its gates."""
    i_r = tl.program_id(0).to(tl.int64)
    i_slot = tl.load(p_slots + i_r).to(tl.int64)
    if i_slot < 0:
        return
    o_i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m_i, o_c, o_w = o_i < TAPS, o_i // (W - 1), o_i % (W - 1)
    p_old = p_conv + i_slot * s_conv_s + o_c * s_conv_c + o_w * s_conv_w
    b_old = tl.load(p_old, mask=m_i)
    p_new = p_window + i_r * s_window_r + o_c * s_window_c + o_w * s_window_w
    tl.store(p_new, b_old, mask=m_i)
    m_g, o_t, o_h = o_i < B * HV, o_i // HV, o_i % HV
    o_kept, o_row = i_r * s_kept_r + o_t * s_kept_t + o_h, i_r * B + o_t
    tl.store(p_kept_a + o_kept, tl.load(p_a + o_row * s_a + o_h, mask=m_g), mask=m_g)
    tl.store(p_kept_b + o_kept, tl.load(p_b + o_row * s_b + o_h, mask=m_g), mask=m_g)


def record_inputs(
    gates: Tensor, window: Tensor, a: Tensor, b: Tensor, conv: Tensor, slots: Tensor
) -> None:
    """Copy the gate inputs of R blocks and the convolution's window before them.

    Args:
        gates: `[2, R or more, B, HV]`, written: the layer's inputs a and b.
        window: `[R or more, C, W - 1]`, written.
        a, b: `[R * B, HV]`, unit stride over heads.
        conv: `[S, C, W - 1]`, the layer's windows in the state pool, any strides.
        slots: int `[R or more]`, the requests' state slots. A request with a negative one is
            skipped.
    """
    _, _, block, heads = gates.shape
    requests, (_, channels, taps) = len(a) // block, conv.shape
    if not requests:
        return
    most = max(channels * taps, block * heads)
    record_inputs_kernel[(requests, triton.cdiv(most, BLOCK))](
        gates[0], gates[1], window, a, b, conv, slots,
        *gates.stride()[1:3], *window.stride(), a.stride(0), b.stride(0),
        *conv.stride(), channels * taps,
        B=block, HV=heads, W=taps + 1, BLOCK=BLOCK,
    )  # fmt: skip


def torch_record_inputs(
    gates: Tensor, window: Tensor, a: Tensor, b: Tensor, conv: Tensor, slots: Tensor
) -> None:
    """The twin of `record_inputs`."""
    count = len(a) // gates.shape[2]
    used = slots[:count].long()
    kept, old = gates[:, :count], window[:count]
    new = torch.stack((a, b)).unflatten(1, kept.shape[1:3])
    kept.copy_(torch.where(used[None, :, None, None] >= 0, new, kept))
    old.copy_(torch.where(used[:, None, None] >= 0, conv[used.clamp(min=0)], old))


def traffic(
    requests: int, block: int, value_heads: int, channels: int, width: int, itemsize: int
) -> Traffic:
    """Bytes of one launch for requests with a slot, with int64 `slots`."""
    programs = triton.cdiv(max(channels * (width - 1), block * value_heads), BLOCK)
    copied = requests * (channels * (width - 1) + 2 * block * value_heads) * itemsize
    return Traffic(copied + requests * programs * 8, copied)
