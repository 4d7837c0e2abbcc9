"""Replacements of SGLang's functions against SGLang's own torch paths."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_dflash.plugins.platform_cpu.linear import update_by_ipc
from sglang_dflash.plugins.platform_cpu.torch_ops import (
    create_on_host,
    send_prefix_without_event,
    softcap_inplace_logits,
    table_qk_norm_rope_,
)

TOKENS, HEADS, KV_HEADS, DIM = 5, 4, 2, 64


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_norm_and_rotation_of_the_built_in_workers_draft(dtype: torch.dtype) -> None:
    """Compare with the modules that SGLang takes where the fused kernel cannot run."""
    from sglang.srt.layers.layernorm import RMSNorm
    from sglang.srt.layers.rotary_embedding import get_rope

    torch.manual_seed(0)
    rope = get_rope(DIM, DIM, 64, 10_000, True)
    norms = [RMSNorm(DIM, eps=1e-6).to(dtype) for _ in "qk"]
    for norm in norms:
        torch.nn.init.uniform_(norm.weight, 0.5, 1.5)
    qkv = torch.randn(TOKENS, (HEADS + 2 * KV_HEADS) * DIM, dtype=dtype)
    positions = torch.randint(0, 64, (TOKENS,))
    q, k, v = qkv.split((HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM), dim=-1)
    normed = [
        norm.forward_native(x.reshape(-1, DIM)).view(x.shape)
        for norm, x in zip(norms, (q, k), strict=True)
    ]
    wanted = torch.cat((*rope.forward_native(positions, *normed), v), dim=-1)
    weights = norms[0].weight, norms[1].weight
    table_qk_norm_rope_(qkv, positions, *weights, rope.cos_sin_cache, HEADS, KV_HEADS, DIM, 1e-6)
    # The reference rounds each product of the rotation to bfloat16.
    rounding = {"rtol": 0.02, "atol": 0.02} if dtype == torch.bfloat16 else {}
    torch.testing.assert_close(qkv, wanted, **rounding)


def test_logits_are_bounded_in_place() -> None:
    """The logits processor computes the same where it knows that it has no GPU. It ignores what the
    function returns, so logits change in place."""
    logits = 40 * torch.randn(TOKENS, DIM)
    wanted = 30 * torch.tanh(logits / 30)
    assert softcap_inplace_logits(logits, 30.0) is logits
    torch.testing.assert_close(logits, wanted)


def test_what_is_changed_for_a_call_comes_back_after_its_failure() -> None:
    def failing(*_: Any) -> None:
        raise KeyError

    current, scheduler = torch.cuda.current_device, SimpleNamespace(enable_overlap=True)
    with pytest.raises(KeyError):
        create_on_host(failing)
    assert torch.cuda.current_device is current
    with pytest.raises(KeyError):
        send_prefix_without_event(failing, scheduler)
    assert scheduler.enable_overlap
    ended: list[dict[str, Any]] = []
    updater = SimpleNamespace(
        begin_weight_update=lambda: None, end_weight_update=lambda **how: ended.append(how)
    )
    with pytest.raises(KeyError):
        update_by_ipc(failing, updater, None)
    assert ended == [{"run_post_load": False}]
