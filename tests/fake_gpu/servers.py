"""Servers on the faked GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sglang_dflash.facts.embedded import demo_pair
from sglang_dflash.platform_cpu import OVERLAP
from tests.engine.servers import ServerConfig, drafting
from tests.fake_gpu.gpu import COUNT, MEMORY_GIB
from tests.fake_gpu.install import ENVIRONMENT

NURSERY = "tests.fake_gpu.nursery"


def on_gpu(config: ServerConfig, *without: str, gib: float = 4, gpus: int = 1) -> ServerConfig:
    """The same server on a faked GPU of `gib` GiB, or on several, and without the packages
    `without`."""
    env = {**ENVIRONMENT, MEMORY_GIB: str(gib), COUNT: str(gpus)}
    # On a GPU, SGLang overlaps by itself.
    kept = {name: value for name, value in config.env.items() if name != OVERLAP}
    return replace(config, env={**kept, **env}, nursery=(NURSERY, *without))


PAIR, HYBRID_PAIR = demo_pair("dense"), demo_pair("hybrid")
# Small pools, and verify graphs of batches that the tests send.
SMALL: dict[str, Any] = {
    "max_total_tokens": 4096,
    "max_running_requests": 2,
    "context_length": 1024,
    "mem_fraction_static": 0.5,
    "sampling_backend": "pytorch",
    "cuda_graph_backend_prefill": "disabled",
    "cuda_graph_max_bs_decode": 2,
}
PLAIN = on_gpu(
    ServerConfig(name="gpu-plain").having(
        model_path=PAIR.target, dtype="float32", attention_backend="triton", **SMALL
    )
)
DFLASH = PLAIN.named("gpu-dflash").having(**drafting(PAIR.draft))
BUILTIN = DFLASH.named("gpu-builtin").having(speculative_dflash_worker="builtin")
