"""The number of recurrent states that `inspect` expects is that of SGLang's own sizing."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.mem_cache import kv_cache_configurator as theirs

from sglang_dflash.memory.pools import sglang_states
from sglang_dflash.tools.inspect.kv import GIB, state_pool
from tests.patches.originals import original

SIZING = "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator"
BLOCK, STATE, REPLAY = 16, 150 << 20, 20 << 20


def by_sglang(
    monkeypatch: pytest.MonkeyPatch, memory: int, requests: int, snapshots: bool
) -> tuple[int, int, float]:
    """States, requests that run at a time, and GiB that are left for KV."""
    schedule = SimpleNamespace(
        max_mamba_cache_size=None, max_running_requests=requests, mamba_full_memory_ratio=0.9,
        disable_overlap_schedule=False,
    )  # fmt: skip
    mamba = SimpleNamespace(
        enable_linear_replayssm_spec=False, enable_mamba_extra_buffer=True,
        enable_mamba_extra_buffer_lazy=False,
    )  # fmt: skip
    settings: dict[str, Any] = {
        "get_schedule": schedule,
        "get_memory": SimpleNamespace(disable_radix_cache=False),
        "get_exec": SimpleNamespace(mamba=mamba),
        "get_spec": SimpleNamespace(speculative_num_draft_tokens=BLOCK),
        "get_context": SimpleNamespace(override=lambda _, **new: vars(schedule).update(new)),
    }
    for name, value in settings.items():
        monkeypatch.setattr(theirs, name, lambda value=value: value)
    monkeypatch.setattr(theirs, "_pd_prefill_skips_mamba_spec_state", lambda: False)
    params = SimpleNamespace(layers=[0], mamba_cache_per_req=STATE)
    configurator = SimpleNamespace(
        mambaish_config=SimpleNamespace(mamba2_cache_params=params), pp_size=1, attn_dp_size=1,
        fused_entry_bytes=lambda _: None, hybrid_gdn_config=None, hybrid_kda_config=None,
        spec_algorithm=SimpleNamespace(is_none=lambda: not snapshots),
        extra_mamba_cache_bytes_per_req=0,
    )  # fmt: skip
    ratio = original(f"{SIZING}._calculate_mamba_ratio")
    configurator._calculate_mamba_ratio = lambda: ratio(configurator)
    left = original(f"{SIZING}._handle_max_mamba_cache")(configurator, memory / GIB)
    slots = schedule.max_mamba_cache_size
    return slots, min(requests, slots // ratio(configurator)), left


@pytest.mark.parametrize("snapshots", [False, True])
@pytest.mark.parametrize("requests", [1, 8, 48])
@pytest.mark.parametrize("gib", [17.0, 60.0])
def test_as_sglang_sizes_it(
    gib: float, requests: int, snapshots: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = int(gib * GIB)
    replay, snapshot = (0, BLOCK * STATE) if snapshots else (REPLAY, 0)
    # `serving.start.memory.size_state_pool` takes off what replay keeps before.
    rest = memory - (requests + 1) * replay
    found = state_pool(sglang_states(rest, STATE, snapshot), requests, STATE, replay, snapshot)
    slots, running, left = by_sglang(monkeypatch, rest, requests, snapshots)
    assert (found.slots, found.requests) == (slots, running)
    assert math.isclose((memory - found.total_bytes) / GIB, left, abs_tol=1e-6)
