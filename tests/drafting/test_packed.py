"""Packed weights against torch's product, and a row's bits beside any other rows."""

from __future__ import annotations

import copy
import platform

import pytest
import torch
from torch import nn

from sglang_dflash.drafting import packed
from tests.conftest import random_model, raw_config

pytestmark = pytest.mark.skipif(
    platform.machine().lower() not in ("x86_64", "amd64"), reason="packed on x86 only"
)
# K above 1,024 is summed in pieces by some kernels.
SHAPES = [(96, 64), (576, 1536), (1536, 576), (200, 72), (33, 17)]


def kinds(k: int, n: int) -> list[packed.Packed]:
    weight = torch.randn(n, k) / k**0.5
    made = [packed.pack(weight), packed.pack(weight, float16=True)]
    if packed.multiplies_bfloat16():
        made.append(packed.pack(weight.bfloat16()))
    return [one for one in made if one is not None]


@pytest.mark.parametrize(("k", "n"), SHAPES)
@pytest.mark.parametrize("rows", [1, 2, 5, 8, 33])
def test_a_packed_product_is_torchs(k: int, n: int, rows: int) -> None:
    for one in kinds(k, n):
        x, bias = torch.randn(rows, k).to(one.dtype), torch.randn(n).to(one.dtype)
        want = x.double() @ one.unpacked().double().T + bias.double()
        # Of sums of about 1: 24 bits of float32, 8 of bfloat16 (each rounded once more for bias).
        tolerance = 3e-2 if one.dtype == torch.bfloat16 else 2e-5
        torch.testing.assert_close(one(x, bias).double(), want, atol=tolerance, rtol=tolerance)
        assert one(x[None])[0].shape == (rows, n)


def test_a_weight_in_float16_is_off_by_its_rounding_only() -> None:
    weight = torch.randn(64, 96).bfloat16().float()
    one = packed.pack(weight, float16=True)
    assert isinstance(one, packed.Float16) and one.nbytes == 2 * weight.numel()
    small = weight.abs() < 6e-5
    assert torch.equal(one.unpacked()[~small], weight[~small])


def test_a_weight_beyond_float16_stays_float32() -> None:
    weight = torch.randn(8, 8)
    weight[0, 0] = 1e6
    assert torch.equal(packed.pack(weight, float16=True).unpacked(), weight)


@pytest.mark.parametrize(("k", "n"), SHAPES)
def test_a_row_of_float32_has_the_same_bits_beside_others(k: int, n: int) -> None:
    one = packed.pack(torch.randn(n, k) / k**0.5)
    x = torch.randn(40, k)
    alone = torch.cat([one(row[None]) for row in x])
    for rows in (*range(1, 18), 24, 33, 40):
        assert torch.equal(one(x[:rows]), alone[:rows]), rows


def test_a_packed_draft_proposes_what_it_proposed() -> None:
    """Every linear layer is packed, and context K/V, features and hidden states stay."""
    raw = {**raw_config(), "attention_bias": True}
    plain = random_model(raw).freeze()
    model = copy.deepcopy(plain)
    model.pack()
    assert not [m for m in model.modules() if type(m) is nn.Linear]
    config = plain.config
    hidden, positions = torch.randn(5, config.target_hidden_width), torch.arange(5)
    torch.testing.assert_close(
        model.context_kv(hidden, positions), plain.context_kv(hidden, positions)
    )
    x = torch.randn(2, 4, config.hidden_size)
    attend = lambda _layer, q, k, v: q * 2.0  # noqa: E731
    at = torch.arange(4).expand(2, 4)
    torch.testing.assert_close(model(x.clone(), at, attend), plain(x.clone(), at, attend))
