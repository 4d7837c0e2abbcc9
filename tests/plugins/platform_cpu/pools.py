"""Settings that SGLang's sizing of the pools reads, without a server."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

FREE_GIB = 20.0
CONFIGURATOR = "sglang.srt.mem_cache.kv_cache_configurator"


def published_by_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    """`FREE_GIB` are free, of which SGLang takes three quarters; the resolved settings of a server
    without graphs are published."""
    schedule = SimpleNamespace(
        mem_fraction_static=0.75,
        prefill_max_requests=None,
        max_mamba_cache_size=None,
    )
    prefill = SimpleNamespace(full_prefill_max_req=None, backend=None)
    execution = SimpleNamespace(
        graph=SimpleNamespace(cuda_graph_config=SimpleNamespace(prefill=prefill))
    )
    parallel = SimpleNamespace(launch_world_size=1, world_group=SimpleNamespace(cpu_group=None))
    values: dict[str, Any] = {
        "get_schedule": schedule,
        "get_exec": execution,
        "get_parallel": parallel,
        "get_disagg": SimpleNamespace(disaggregation_mode="null"),
        "get_mm": SimpleNamespace(mm_feature_transport="default"),
    }
    for name, value in values.items():
        for place in (CONFIGURATOR, "sglang.srt.runtime_context"):
            monkeypatch.setattr(f"{place}.{name}", lambda value=value: value)
    for place in (CONFIGURATOR, "sglang.srt.utils.common"):
        monkeypatch.setattr(f"{place}.get_available_gpu_memory", lambda *_, **__: FREE_GIB)


def configurator_of(
    model: torch.nn.Module, flags: dict[str, Any], state_gib: float | None = None
) -> Any:
    """A `KVCacheConfigurator` of a server started with `flags`.

    `state_gib`: recurrent states take as much; a share of 0.5 of the memory at hand if it is 0.
    """

    def left(memory: float) -> float:
        return memory - (state_gib or memory / 2)

    return SimpleNamespace(
        device="cpu",
        gpu_id=0,
        model=model,
        model_config=SimpleNamespace(is_multimodal=False),
        mambaish_config=None if state_gib is None else object(),
        post_capture_kv_active=False,
        server_args=SimpleNamespace(_raw_input=flags),
        _handle_max_mamba_cache=left,
    )
