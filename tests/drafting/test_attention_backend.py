"""Selection of draft attention: by name, refused with the list of what would work."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from sglang_dflash.drafting.attention.backend import (
    BACKENDS,
    Backend,
    Capabilities,
    Setting,
    make_attention,
)
from sglang_dflash.drafting.attention.reference import TorchAttention
from sglang_dflash.drafting.attention.table import ContextTable
from sglang_dflash.facts.draft_config import WHOLE_CONTEXT, DraftConfig
from sglang_dflash.facts.errors import ConfigError
from tests.conftest import raw_config

CPU = Setting(4, torch.device("cpu"), WHOLE_CONTEXT)
SLIDING = {"layer_types": ["sliding_attention"] * 3, "sliding_window": 6}


def config(**changes: object) -> DraftConfig:
    return DraftConfig.from_dict(raw_config(**changes))


def only(**limits: Any) -> dict[str, Backend]:
    """The table with one more backend, `narrow`, that has these limits."""
    narrow = replace(BACKENDS["torch"], capabilities=Capabilities(**limits))
    return {**BACKENDS, "narrow": narrow}


def test_an_unknown_name_is_refused_with_the_list() -> None:
    with pytest.raises(ConfigError, match=r"'fa9'; unknown; choose one of \['torch'\]"):
        make_attention("fa9", config(), CPU)


@pytest.mark.parametrize(
    ("limits", "changes", "message"),
    [
        ({"devices": frozenset({"cuda"})}, {}, "runs on cuda, not on cpu"),
        ({"head_dims": frozenset({64, 128})}, {}, "serves head dim 64, 128, the draft's is 16"),
    ],
    ids=["device", "head-dim"],
)
def test_what_a_backend_cannot_serve_is_refused(
    limits: dict[str, object], changes: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=rf"'narrow'; {message}.*choose one of \['torch'\]"):
        make_attention("narrow", config(**changes), CPU, only(**limits))


def test_within_its_limits_a_backend_serves() -> None:
    limits = {"devices": frozenset({"cpu"}), "head_dims": frozenset({16})}
    assert make_attention("narrow", config(), CPU, only(**limits)) is not None


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
