"""Servers on the faked GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sglang_dflash.plugins.platform_cpu import OVERLAP
from sglang_dflash.tools.demo_pairs.pairs import demo_pair
from tests.engine import front_ends
from tests.engine import servers as cpu
from tests.engine.servers import (  # fmt: skip
    FILES,
    LOOKUP,
    SECOND,
    STRICT,
    WIDE,
    WINDOW,
    ServerConfig,
    drafting,
    faulty,
)
from tests.fake_gpu.asks import SHORT_CONTEXT
from tests.fake_gpu.gpu import COUNT, MEMORY_GIB
from tests.fake_gpu.hooks import TWINS
from tests.fake_gpu.install import ENVIRONMENT

NURSERY = "tests.fake_gpu.nursery"


def on_gpu(config: ServerConfig, *without: str, gib: float = 4, gpus: int = 1) -> ServerConfig:
    """The same server on a faked GPU of `gib` GiB, or on several, and without the packages
    `without`."""
    env = {**ENVIRONMENT, MEMORY_GIB: str(gib), COUNT: str(gpus)}
    # On a GPU, SGLang overlaps by itself.
    kept = {name: value for name, value in config.env.items() if name != OVERLAP}
    return replace(config, env={**kept, **env}, nursery=(NURSERY, *without))


def on_this_gpu(config: ServerConfig) -> ServerConfig:
    """The same server on the GPU of this machine, started from the command line: CUDA does not
    survive a fork."""
    faked = {*ENVIRONMENT, MEMORY_GIB, COUNT, TWINS}
    env = {name: value for name, value in config.env.items() if name not in faked}
    return replace(config.named(f"real-{config}"), env=env, nursery=())


DENSE, HYBRID = demo_pair("dense"), demo_pair("hybrid")
# Small pools, and graphs of one and two requests: larger batches run without.
SMALL: dict[str, Any] = {
    "max_total_tokens": 4096,
    "max_running_requests": 4,
    "context_length": 1024,
    "mem_fraction_static": 0.5,
    "sampling_backend": "pytorch",
    "cuda_graph_backend_prefill": "disabled",
    "cuda_graph_max_bs_decode": 2,
}
PLAIN = on_gpu(
    ServerConfig(name="gpu-plain").having(
        model_path=DENSE.target, dtype="float32", attention_backend="triton", **SMALL
    )
)
# Torch code in place of our slowest kernels; they run in OWN_KERNELS.
DFLASH = PLAIN.named("gpu-dflash").having(**drafting(DENSE.draft)).with_env(**{TWINS: "1"})
OWN_KERNELS = replace(DFLASH.named("gpu-own-kernels"), env=PLAIN.env)
BUILTIN = DFLASH.named("gpu-builtin").having(speculative_dflash_worker="builtin")
EAGER = OWN_KERNELS.named("gpu-eager").having(
    disable_cuda_graph=True, disable_overlap_schedule=True
)
NO_OVERLAP = DFLASH.named("gpu-no-overlap").having(disable_overlap_schedule=True)
NO_DRAFT_GRAPHS = DFLASH.named("gpu-no-draft-graphs").having(speculative_dflash_draft_graphs="off")
# What else a step can do: lookup beyond the draft's block, widths that change, a window in pages,
# prompts in chunks, and a pool so small that requests are retracted.
LOOKED_UP = DFLASH.named("gpu-lookup").having(speculative_dflash_width="adaptive", **WIDE)
TIGHT = (
    DFLASH.named("gpu-tight")
    .having(page_size=16, chunked_prefill_size=64, max_total_tokens=1088, **WINDOW, **LOOKUP)
    .having(speculative_draft_model_path=f"{FILES}/mixed-draft")
    .with_env(SGLANG_TEST_RETRACT="1", SGLANG_TEST_RETRACT_INTERVAL="7", **STRICT)
)
SECOND_DRAFT = DFLASH.named("gpu-dflash2").having(**SECOND)
ONE_REQUEST = DFLASH.named("gpu-one-request").having(
    max_running_requests=1, max_total_tokens=512, context_length=None
)
# Whose target writes calls of tools.
TOLD = (
    on_gpu(front_ends.TOLD.named("gpu-told"))
    .having(attention_backend="triton", **SMALL)
    .with_env(**{TWINS: "1"})
)
SEEDED_PLAIN = PLAIN.named("gpu-seeded-plain").having(enable_deterministic_inference=True)
SEEDED = SEEDED_PLAIN.named("gpu-seeded").having(**drafting(DENSE.draft))
FAULTY = faulty(DFLASH)
TP2 = on_gpu(DFLASH.having(tp_size=2, disable_custom_all_reduce=True), gpus=2).named("gpu-tp2")
# FlashAttention 3, which serves 16 bits only.
FA3_PLAIN = PLAIN.named("gpu-fa3-plain").having(dtype="bfloat16", attention_backend="fa3")
FA3 = (
    FA3_PLAIN.named("gpu-fa3")
    .with_env(**{TWINS: "1"})
    .having(**drafting(DENSE.draft), speculative_draft_attention_backend="fa3")
)
FA3_SHORT_PLAIN, FA3_SHORT = (
    config.named(f"{config}-short").having(context_length=SHORT_CONTEXT)
    for config in (FA3_PLAIN, FA3)
)
FLASHINFER = DFLASH.named("gpu-flashinfer-sampling").having(sampling_backend="flashinfer")
# FlashInfer's attention, of 16 bits, for the target; ours drafts with Triton then.
FLASHINFER_PLAIN = PLAIN.named("gpu-flashinfer-plain").having(
    dtype="bfloat16", attention_backend="flashinfer"
)
FLASHINFER_TARGET = (
    FLASHINFER_PLAIN.named("gpu-flashinfer-target")
    .with_env(**{TWINS: "1"})
    .having(**drafting(DENSE.draft))
)
# As in an environment where FlashInfer cannot be installed.
BARE = on_gpu(DFLASH, "flashinfer").named("gpu-bare")
BARE_BUILTIN = on_gpu(BUILTIN, "flashinfer").named("gpu-bare-builtin")
# The pair and its size: SGLang chooses dtype, backends and batch sizes, and captures prefills.
DEFAULT_PLAIN = on_gpu(
    ServerConfig(name="gpu-default-plain").having(
        model_path=DENSE.target,
        max_running_requests=4,
        context_length=1024,
        max_total_tokens=4096,
        mem_fraction_static=0.5,
    )
)
DEFAULT = (
    DEFAULT_PLAIN.named("gpu-default")
    .having(speculative_algorithm="DFLASH", speculative_draft_model_path=DENSE.draft)
    .with_env(**{TWINS: "1"})
)
PREFILL_GRAPHS = DFLASH.named("gpu-prefill-graphs").having(
    cuda_graph_backend_prefill=None, cuda_graph_max_bs_prefill=64
)
# As many KV tokens as there is memory for.
SIZED = on_gpu(DFLASH.named("gpu-sized").having(max_total_tokens=None, dtype="bfloat16"), gib=3)
SIZED_WINDOW = SIZED.named("gpu-sized-window").having(speculative_draft_window_size=256)

# Recurrent layers: SGLang's prefill of them takes 16 bits only.
HYBRID_PLAIN = (
    PLAIN.named("gpu-hybrid-plain")
    .having(model_path=HYBRID.target, dtype="bfloat16", max_mamba_cache_size=16)
    .with_env(**{TWINS: "1"})
)
HYBRID_REPLAY = HYBRID_PLAIN.named("gpu-hybrid-replay").having(
    **drafting(HYBRID.draft), linear_attn_verify_backend="triton"
)
HYBRID_SIZED = on_gpu(
    HYBRID_REPLAY.named("gpu-hybrid-sized").having(
        max_total_tokens=None, max_mamba_cache_size=None
    ),
    gib=3,
).with_env(**{TWINS: "1"})
HYBRID_SNAPSHOT = HYBRID_REPLAY.named("gpu-hybrid-snapshot").having(
    speculative_dflash_recurrent_rollback="snapshot"
)
HYBRID_BUILTIN = HYBRID_REPLAY.named("gpu-hybrid-builtin").having(
    speculative_dflash_worker="builtin"
)


# With the lm_head.
NVFP4_PLAIN = (
    PLAIN.named("gpu-NVFP4-plain")
    .having(model_path=f"{FILES}/target-NVFP4/quantized", dtype="bfloat16")
    .with_env(**{TWINS: "1"})
)
NVFP4 = NVFP4_PLAIN.named("gpu-NVFP4").having(**drafting(DENSE.draft))
# The same values as plain weights.
NVFP4_VALUES = NVFP4_PLAIN.named("gpu-NVFP4-values").having(
    model_path=f"{FILES}/target-NVFP4/plain"
)
NVFP4_DFLASH2 = NVFP4.named("gpu-NVFP4-dflash2").having(**SECOND)
# With graphs of prefills of up to 128 tokens.
GRAPHS: dict[str, Any] = {"cuda_graph_backend_prefill": None, "cuda_graph_max_bs_prefill": 128}
HYBRID_GRAPHS = HYBRID_REPLAY.named("gpu-hybrid-prefill-graphs").having(**GRAPHS)
HYBRID_BUILTIN_GRAPHS = HYBRID_BUILTIN.named("gpu-hybrid-builtin-prefill-graphs").having(**GRAPHS)
# All of it in float32, which SGLang's own prefill kernels refuse, and compared with the CPU engine:
# prompts in chunks, and requests that are retracted.
HYBRID_REFERENCE = cpu.PLAIN.named("gpu-hybrid-reference").having(
    model_path=HYBRID.target, max_mamba_cache_size=64, max_running_requests=8
)
HYBRID_EXACT = (
    HYBRID_REPLAY.named("gpu-hybrid-exact")
    .having(dtype="float32", chunked_prefill_size=64)
    .with_env(SGLANG_TEST_RETRACT="1", SGLANG_TEST_RETRACT_INTERVAL="7", **STRICT)
    .with_env(SGLANG_MAMBA_CONV_DTYPE="float32")
)
