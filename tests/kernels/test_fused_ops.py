"""add + RMSNorm, SiLU x up, and q/k norm + RoPE against their twins, which run in float32."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from dflash_kernels import add_rms_norm, qk_norm_rope, silu_mul
from torch import Tensor

from sglang_dflash.checkpoint.draft_rope import RopeConfig
from sglang_dflash.drafting.ops import TorchOps
from sglang_dflash.drafting.rope import Rotary
from tests.kernels.support import DEVICE, Canaries, counted_bytes

# Of the twin in float32. float32: another order of sums. Others: up to three roundings, to 2^-12 or
# 2^-9 of a value.
TOLERANCE = {torch.float32: 3e-6, torch.float16: 3 * 2**-12, torch.bfloat16: 3 * 2**-9}
DTYPES = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)


def some(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def check_close(
    got: Tensor, expected: Tensor, dtype: torch.dtype, summed: Sequence[Tensor] = ()
) -> None:
    """`summed`: what `expected` is the sum of; it may cancel, and their roundings do not."""
    size = sum((of.float().abs() for of in summed), expected.abs())
    assert ((got.float() - expected).abs() <= TOLERANCE[dtype] * (1 + size)).all()


@pytest.mark.parametrize("extra", ["plain", "residual", "residual-bias"])
@pytest.mark.parametrize(("count", "width"), [(3, 32), (5, 45), (1, 100), (0, 32)])
@DTYPES
def test_add_rms_norm(dtype: torch.dtype, count: int, width: int, extra: str) -> None:
    canaries, eps = Canaries(), 1e-3
    # Rows of a wider matrix.
    x, weight = some(count, width + 7, dtype=dtype)[:, :width], some(width, dtype=dtype)
    bias = some(width, dtype=dtype) if "bias" in extra else None
    residual = canaries.around(some(count, width, dtype=dtype)) if "residual" in extra else None
    summed = [of.clone() for of in (x, residual, bias) if of is not None]
    expected, total = TorchOps().add_rms_norm(
        x.float(),
        None if residual is None else residual.float(),
        weight.float(),
        eps,
        None if bias is None else bias.float(),
    )
    out = canaries.around(torch.full((count, width), 9.0, device=DEVICE).to(dtype))
    with counted_bytes() as bytes_:
        add_rms_norm.add_rms_norm(out, x, residual, weight, eps, bias)
    kinds = {"residual": residual is not None, "bias": bias is not None}
    bytes_.check(add_rms_norm.traffic(count, width, x.element_size(), **kinds))
    check_close(out, expected, dtype)
    if residual is not None:
        check_close(residual, total, dtype, summed)
    assert canaries.are_alive()


def test_a_sum_that_is_not_needed_is_not_stored() -> None:
    x, residual, weight, out = some(3, 40), some(3, 40), some(40), some(3, 40)
    before = residual.clone()
    with counted_bytes() as bytes_:
        add_rms_norm.add_rms_norm(out, x, residual, weight, 1e-6, store_sum=False)
    bytes_.check(add_rms_norm.traffic(3, 40, 4, residual=True, bias=False, store_sum=False))
    assert torch.equal(residual, before)
    check_close(out, TorchOps().add_rms_norm(x, residual, weight, 1e-6)[0], torch.float32)


def test_large_batches_share_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [add_rms_norm.rows(count) for count in (1, 511, 512)] == [1, 1, 4]
    monkeypatch.setattr(add_rms_norm, "rows", lambda _: 4)
    canaries, weight = Canaries(), some(40)
    x, residual = some(6, 40), canaries.around(some(6, 40))
    expected, total = TorchOps().add_rms_norm(x, residual, weight, 1e-6, weight)
    out = canaries.around(some(6, 40))
    with counted_bytes() as bytes_:
        add_rms_norm.add_rms_norm(out, x, residual, weight, 1e-6, weight)
    bytes_.check(add_rms_norm.traffic(6, 40, 4, residual=True, bias=True))
    check_close(out, expected, torch.float32)
    check_close(residual, total, torch.float32)
    assert canaries.are_alive()


@pytest.mark.parametrize(("count", "width"), [(3, 32), (2, 1100), (1, 45), (0, 32)])
@DTYPES
def test_silu_mul(dtype: torch.dtype, count: int, width: int) -> None:
    canaries, x = Canaries(), some(count, 2 * width, dtype=dtype)
    out = canaries.around(torch.full((count, width), 9.0, device=DEVICE).to(dtype))
    with counted_bytes() as bytes_:
        silu_mul.silu_mul(out, x)
    bytes_.check(silu_mul.traffic(count, width, x.element_size()))
    check_close(out, TorchOps().silu_mul(x.float()), dtype)
    assert canaries.are_alive()


def rotary(head_dim: int) -> Rotary:
    """YaRN, so that the factor on cos and sin is not 1."""
    scaling = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096}
    return Rotary(RopeConfig(150000.0, scaling), head_dim, 131072).to(DEVICE)


# heads, kv heads, head dim
HEADS = {"gpt-oss": (16, 2, 64), "qwen3": (4, 1, 128), "odd": (3, 3, 16), "phi-3": (2, 1, 96)}


@pytest.mark.parametrize("shape", HEADS.values(), ids=HEADS)
@DTYPES
def test_qk_norm_rope(dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    heads, kv_heads, head_dim = shape
    positions = torch.tensor([0, 1, 262143, 40960, 7], device=DEVICE)
    q_weight, k_weight = some(head_dim, dtype=dtype), some(head_dim, dtype=dtype)
    canaries = Canaries()
    qkv = canaries.around(some(5, (heads + 2 * kv_heads) * head_dim, dtype=dtype))
    values = qkv[:, -kv_heads * head_dim :].clone()
    used, twin = rotary(head_dim), TorchOps()
    rotation = twin.rotation(used, positions, torch.float32)
    expected = twin.qk_norm_rope(
        qkv.float(), q_weight.float(), k_weight.float(), rotation, heads, 1e-3
    )
    with counted_bytes() as bytes_:
        qk_norm_rope.qk_norm_rope(qkv, positions, q_weight, k_weight, used, heads, 1e-3)
    bytes_.check(qk_norm_rope.traffic(5, *shape, qkv.element_size()))
    check_close(qkv, torch.cat(expected, dim=1).flatten(1), dtype)
    assert torch.equal(qkv[:, -kv_heads * head_dim :], values)
    assert canaries.are_alive()


def test_no_tokens() -> None:
    weight, none = some(16), torch.empty(0, dtype=torch.int64, device=DEVICE)
    qk_norm_rope.qk_norm_rope(some(0, 80), none, weight, weight, rotary(16), 3, 1e-6)
    cache = some(4, 2, 2, 1, 16)
    kv, weights = some(0, 2, 2, 1, 16), some(2, 16)
    qk_norm_rope.write_context(cache, kv, none, none, weights, rotary(16), 1e-6)


CACHES = [
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float8_e4m3fn),
]


@pytest.mark.parametrize(("dtype", "cache_dtype"), CACHES, ids=str)
@pytest.mark.parametrize("shape", HEADS.values(), ids=HEADS)
def test_write_context(
    shape: tuple[int, int, int], dtype: torch.dtype, cache_dtype: torch.dtype
) -> None:
    _, kv_heads, head_dim = shape
    depth, canaries = 2, Canaries()
    kv, weights = some(5, depth, 2, kv_heads, head_dim, dtype=dtype), some(depth, head_dim)
    entries = torch.tensor([6, -1, 0, 3, -1], device=DEVICE)
    positions = torch.tensor([5, 0, 131071, 77, 2], device=DEVICE)
    kv[1], kv[4] = float("nan"), float("nan")
    if cache_dtype == torch.float8_e4m3fn:
        kv[0, 0, 1] = 1000.0  # beyond its range
    before = torch.zeros(8, depth, 2, kv_heads, head_dim, device=DEVICE).to(cache_dtype)
    cache, expected, used = canaries.around(before), before.float().clone(), rotary(head_dim)
    with counted_bytes() as bytes_:
        qk_norm_rope.write_context(cache, kv, entries, positions, weights.to(dtype), used, 1e-3)
    sizes = kv.element_size(), cache.element_size()
    bytes_.check(qk_norm_rope.write_context_traffic(5, 3, depth, kv_heads, head_dim, *sizes))
    TorchOps().write_context(
        expected, kv.float(), entries, positions, weights.to(dtype).float(), used, 1e-3
    )
    expected[-1] = 0  # padding
    if cache_dtype == torch.float8_e4m3fn:
        # 3 bits after the point, and a smallest number of 2^-9.
        expected = expected.clamp(-448, 448)
        torch.testing.assert_close(cache.float(), expected, atol=2**-10, rtol=2**-4)
    else:
        check_close(cache, expected, cache_dtype)
    written = [0, 3, 6]
    rest = [i for i in range(8) if i not in written]
    assert torch.equal(cache[rest].float(), before[rest].float())
    assert cache.float().isfinite().all() and canaries.are_alive()


@pytest.mark.parametrize(("dtype", "cache_dtype"), CACHES, ids=str)
def test_what_is_written_is_finite(dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
    """A projection may overflow: infinity in a key becomes NaN in its norm, and torch writes the
    same."""
    kv, weights, used = some(3, 2, 2, 2, 16, dtype=dtype), some(2, 16, dtype=dtype), rotary(16)
    broken = torch.tensor([float("nan"), float("inf"), float("-inf")], dtype=dtype)
    kv[0, 0, 0, 1, :3], kv[1, 1, 0, 0, 4], kv[2, :, 1, 1, 5:8] = broken, float("inf"), broken
    entries, positions = torch.tensor([[1, 3, 0], [7, 0, 130000]], device=DEVICE)
    ours, torchs = torch.zeros(2, 5, 2, 2, 2, 16, device=DEVICE).to(cache_dtype)
    qk_norm_rope.write_context(ours, kv, entries, positions, weights, used, 1e-3)
    TorchOps().write_context(torchs, kv, entries, positions, weights, used, 1e-3)
    assert ours.float().isfinite().all() and torchs.float().isfinite().all()
    limit = torch.finfo(cache_dtype).max
    for cache in (ours.float(), torchs.float()):
        assert cache[0, :, 1, 1, 5:8].tolist() == [[0, limit, -limit]] * 2
        assert cache[1, 0, 0, 1].count_nonzero() == cache[3, 1, 0, 0].count_nonzero() == 0
