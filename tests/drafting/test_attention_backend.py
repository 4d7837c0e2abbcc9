"""Selection of draft attention: by name, refused with the list of what would work."""

from __future__ import annotations

import pytest
import torch

from sglang_dflash.checkpoint.draft_config import DraftConfig
from sglang_dflash.drafting.attention import capabilities
from sglang_dflash.drafting.attention.capabilities import Capabilities, choose_attention
from sglang_dflash.drafting.attention.reference import TorchAttention
from sglang_dflash.drafting.attention.table import ContextTable
from tests.conftest import raw_config
from tests.errors import refused

SLIDING = {"layer_types": ["sliding_attention"] * 3, "sliding_window": 6}


def config(**changes: object) -> DraftConfig:
    return DraftConfig.from_dict(raw_config(**changes))


NARROW = Capabilities(frozenset({"cuda"}), frozenset({16}), kv_dtypes=frozenset({"float16"}))


@pytest.mark.parametrize(
    ("name", "device", "changes", "obstacle"),
    [
        ("fa9", "cuda", {}, "unknown"),
        ("narrow", "cpu", {}, "runs on cuda, not on cpu"),
        ("narrow", "cuda", {"head_dim": 32}, "serves head dim 16, the draft's is 32"),
        ("narrow", "cuda", {}, "serves draft K/V in float16, not in float32"),
    ],
)
def test_what_a_backend_cannot_serve_is_refused_with_the_list(
    name: str,
    device: str,
    changes: dict[str, object],
    obstacle: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table = {"torch": capabilities.CAPABILITIES["torch"], "narrow": NARROW}
    monkeypatch.setattr(capabilities, "CAPABILITIES", table)
    given = config(**changes), device
    with refused("attention", name) as error:
        choose_attention(name, *given, "float32")
    assert error.value.required == f"{obstacle}; choose one of ['torch']"
    assert choose_attention("torch", *given) == choose_attention(None, *given) == "torch"


def test_within_its_limits_a_backend_serves() -> None:
    assert NARROW.obstacle(config(), "cuda", "float16") is None


def test_the_reference_leaves_the_cache_as_it_is() -> None:
    """The block's own K/V goes to free columns of a copy: no entry changes, padding included."""
    layers, block = config(**SLIDING).layers, 4
    attention, kv = TorchAttention(layers, block), torch.randn(9, 3, 2, 2, 16)
    before = kv.clone()
    entries = torch.tensor([[5, 6], [0, -1]], dtype=torch.int32)
    attention.prepare(kv, ContextTable(entries, torch.tensor([2, 1])))
    q, own = torch.randn(2, block, 4, 16), torch.randn(2, block, 2, 16)
    for layer in range(3):
        assert attention.attend(layer, q, own, own).shape == q.shape
    assert kv.equal(before)
