"""Memory of the KV and state pools on a plain CPU, where pools must not take all free memory.

SGLang gives its pools all free memory of a device, less a reserve. On a CPU that is the memory of
the whole machine: the pools of a 6 MB model took 9 GB.
"""

from __future__ import annotations

import gc
from typing import Any

import torch

from sglang_dflash.common.log import Log
from sglang_dflash.drafting.packed import packed_of

logger = Log(__name__)

GIB = 1 << 30
# The least memory for pools; enough for some ten thousand tokens of a tiny model.
LEAST_BYTES = 256 << 20
# The least fraction of free memory for weights and pools. SGLang leaves 1.5 MiB of a GPU for the
# activations of each token of a prefill: of --max-prefill-tokens, 24 GiB, without chunked prefill.
LEAST_FRACTION = 0.5


def profile_available_bytes(original: Any, configurator: Any, pre_model_load_memory: float) -> int:
    """Around `KVCacheConfigurator._profile_available_bytes`: bytes for the KV pool.

    The recurrent states' share is subtracted. Pools that a flag sizes stay as SGLang sizes them:
    all with `--mem-fraction-static`, the KV pool with `--max-total-tokens`, the states with
    `--max-mamba-cache-size`.

    Args:
        pre_model_load_memory: GiB that were free before the weights were loaded.

    Raises:
        ValueError: the states leave nothing for the KV pool.
    """
    flags = getattr(configurator.server_args, "_raw_input", None) or {}
    if flags.get("mem_fraction_static") is not None:
        return original(configurator, pre_model_load_memory)
    free = _sglangs_share(configurator, pre_model_load_memory)
    if free <= 0:
        # SGLang raises an error that says why.
        return original(configurator, pre_model_load_memory)
    weights = weight_bytes(configurator.model)
    # The pools get as much memory as the weights take.
    spared = min(free, max(LEAST_BYTES, weights) / GIB)
    sized_states = flags.get("max_mamba_cache_size") is not None
    states = _state_gib(configurator, free if sized_states else spared)
    kv = spared if sized_states else spared - states
    if flags.get("max_total_tokens") is not None:
        kv = free - states
    kv = min(kv, free - states)
    if kv <= 0:
        raise ValueError(
            f"recurrent states take {states:.2f} GiB and leave nothing for the KV pool of the "
            f"{spared:.2f} GiB that the pools get on a CPU; lower --max-running-requests, or give "
            "--mem-fraction-static to set the pools' share of memory"
        )
    if flags.get("max_total_tokens") is None:
        logger.info(
            "the pools get %.0f MiB of %.1f GiB that are free (recurrent states "
            "%.0f MiB, KV at most %.0f MiB); --mem-fraction-static or --max-total-tokens sets "
            "another size",
            (states + kv) * 1024,
            free,
            states * 1024,
            kv * 1024,
        )
    return int(kv * GIB)


def weight_bytes(model: torch.nn.Module) -> int:
    """Return the bytes of a model's parameters, and of packed weights that replace a parameter."""
    packed = sum(
        weight.nbytes
        for layer in model.modules()
        if (weight := packed_of(layer)) is not None and "weight" not in layer._parameters
    )
    return packed + sum(parameter.nbytes for parameter in model.parameters())


def _sglangs_share(configurator: Any, pre_model_load_memory: float) -> float:
    """GiB that SGLang would give the pools, and at least `LEAST_FRACTION` less the weights."""
    from sglang.srt.runtime_context import get_parallel, get_schedule
    from sglang.srt.utils.common import get_available_gpu_memory

    gc.collect()
    available = get_available_gpu_memory(
        configurator.device,
        configurator.gpu_id,
        distributed=get_parallel().launch_world_size > 1,
        cpu_group=get_parallel().world_group.cpu_group,
    )
    fraction = max(get_schedule().mem_fraction_static, LEAST_FRACTION)
    return available - pre_model_load_memory * (1 - fraction)


def _state_gib(configurator: Any, memory: float) -> float:
    """GiB that SGLang gives the recurrent states if it divides `memory` GiB."""
    if configurator.mambaish_config is None:
        return 0.0
    return memory - configurator._handle_max_mamba_cache(memory)
