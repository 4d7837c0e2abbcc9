"""Memory of the pools on a plain CPU: bounded by the model's size unless a flag sets it."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_dflash.plugins.platform_cpu.pool_size import LEAST_BYTES, profile_available_bytes
from tests.plugins.platform_cpu.pools import FREE_GIB, configurator_of, published_by_sglang

GIB = 1 << 30
SGLANGS = 15 * GIB


@pytest.fixture(autouse=True)
def _published(monkeypatch: pytest.MonkeyPatch) -> None:
    published_by_sglang(monkeypatch)


def sized(gib: float, flags: dict[str, Any], state_gib: float | None = None) -> int:
    """Bytes for the KV pool of a model whose weights take `gib`."""
    model = torch.nn.ParameterList([torch.empty(int(gib * GIB / 4), device="meta")])
    configurator = configurator_of(model, flags, state_gib)
    return profile_available_bytes(lambda *_: -1, configurator, FREE_GIB)


def test_a_tiny_model_takes_little_and_a_large_one_as_much_as_its_weights(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO):
        assert sized(0.001, {}) == LEAST_BYTES
    (line,) = [r.getMessage() for r in caplog.records if "the pools get" in r.getMessage()]
    assert "256 MiB of 15.0 GiB" in line
    assert "--mem-fraction-static" in line and "--max-total-tokens" in line
    assert sized(3, {}) == 3 * GIB
    assert sized(30, {}) == SGLANGS


def test_flags_of_the_user_win(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert sized(0.001, {"mem_fraction_static": 0.75}) == -1, "not SGLang's own sizing"
    assert sized(0.001, {"max_total_tokens": 10**6}) == SGLANGS
    # The pool takes as much as those tokens need, which SGLang tells.
    assert "the pools get" not in caplog.text
    # Unset flags are None in what SGLang keeps of the command line.
    assert sized(0.001, {"mem_fraction_static": None, "max_total_tokens": None}) == LEAST_BYTES


def test_recurrent_states_come_out_of_the_same_memory() -> None:
    assert sized(2, {}, state_gib=0) == 1 * GIB
    assert sized(2, {"max_total_tokens": 10**6}, state_gib=0) == SGLANGS - 1 * GIB
    # States of a given number do not take the KV pool's part.
    assert sized(2, {"max_mamba_cache_size": 500}, state_gib=4) == 2 * GIB
    assert sized(2, {"max_mamba_cache_size": 500}, state_gib=14) == 1 * GIB
    with pytest.raises(
        ValueError, match=r"states take 3.00 GiB .* of the 2.00 GiB .*--max-running"
    ):
        sized(2, {}, state_gib=3)


def test_a_reserve_for_a_gpus_activations_does_not_take_a_small_machines_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    schedule = SimpleNamespace(mem_fraction_static=-0.049)
    monkeypatch.setattr("sglang.srt.runtime_context.get_schedule", lambda: schedule)
    assert sized(0.001, {}) == LEAST_BYTES
    assert sized(30, {}) == 10 * GIB


def test_too_little_memory_is_sglangs_error() -> None:
    configurator = configurator_of(torch.nn.Linear(2, 2), {})

    def refuse(*_: Any) -> int:
        raise ValueError("Loaded weights leave no GPU memory")

    with pytest.raises(ValueError, match="Loaded weights"):
        profile_available_bytes(refuse, configurator, 4 * FREE_GIB + 1)
