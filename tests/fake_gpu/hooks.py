"""Replacements in modules of SGLang, FlashInfer and ours, made once they are imported."""

from __future__ import annotations

import gc
import importlib
import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Callable
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from sglang_dflash.plugins.platform_cpu import patches as platform_cpu
from tests.fake_gpu.gloo import GlooCommunicator
from tests.fake_gpu.gpu import GPU
from tests.fake_gpu.kernels import (
    attention,
    elementwise,
    flashinfer,
    marlin,
    recurrent,
    sampling,
    twins,
)
from tests.fake_gpu.launches import function, kernel
from tests.fake_gpu.tensor import COMPILED, CudaTensor, new_parameter

# A variable of a server: SGLang's attention in the interpreter, 50 times slower than torch code.
INTERPRETED_ATTENTION = "FAKE_GPU_INTERPRETED_ATTENTION"
# A variable of a server: torch code in place of the slowest kernels, ours and SGLang's.
TWINS = "FAKE_GPU_TWINS"
Hook = Callable[[Any], None]


class AfterImport(importlib.abc.MetaPathFinder):
    """Calls `hooks[name](module)` once a module has been imported."""

    def __init__(self, hooks: dict[str, Hook]) -> None:
        self.hooks = hooks

    def find_spec(
        self, name: str, path: Any, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        hook = self.hooks.pop(name, None)
        if hook is None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return None
        loader: Any = spec.loader
        run = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            hook(module)

        loader.exec_module = exec_module
        return spec


def load_jit(name: str, *args: Any, **_: Any) -> SimpleNamespace:
    """Stand-in for SGLang's compiler of CUDA modules."""
    modules = {
        **elementwise.MODULES,
        **marlin.MODULES,
        "speculative_sampling": speculative_sampling,
    }
    if name not in modules:
        raise NotImplementedError(f"tests/fake_gpu/kernels has no torch code for the JIT's {name}")
    values = [x for each in args for x in (each if isinstance(each, list | tuple) else [each])]
    functions = modules[name](*values)
    return SimpleNamespace(**{name: kernel(run) for name, run in functions.items()})


def speculative_sampling(*_: Any) -> dict[str, Callable[..., None]]:
    """The module includes FlashInfer's headers."""
    if sys.modules.get("flashinfer", 0) is None:
        raise ModuleNotFoundError("No module named 'flashinfer'")
    return {"sample": sampling.speculative_sampling}


def jit_loader(module: Any) -> None:
    module.load_jit = load_jit


def extend_attention(module: Any) -> None:
    module.extend_attention_fwd = unless_interpreted(
        module.extend_attention_fwd, attention.extend_attention
    )


def decode_attention(module: Any) -> None:
    module.decode_attention_fwd = unless_interpreted(
        module.decode_attention_fwd, attention.decode_attention
    )


def unless_interpreted(theirs: Callable[..., Any], run: Callable[..., None]) -> Callable[..., Any]:
    launch = kernel(run)

    def choose(*args: Any, **kwargs: Any) -> Any:
        chosen = theirs if os.environ.get(INTERPRETED_ATTENTION) else launch
        return chosen(*args, **kwargs)

    return choose


def flashinfer_attention(module: Any) -> None:
    for name, value in flashinfer.CLASSES.items():
        setattr(module, name, value)


def flashinfer_cascade(module: Any) -> None:
    module.merge_state = flashinfer.merge_state


def flashinfer_sampling(module: Any) -> None:
    for name, run in sampling.FLASHINFER.items():
        setattr(module, name, run)


def flashinfer_prefill(module: Any) -> None:
    module.chunk_gated_delta_rule = recurrent.chunk_gated_delta_rule


def flashinfer_norms(module: Any) -> None:
    """FlashInfer compiles them; sgl_kernel has the same."""

    def norm(name: str) -> Callable[..., Tensor]:
        def run(
            x: Tensor, weight: Tensor, eps: float = 1e-6, out: Any = None, enable_pdl: Any = None
        ) -> Tensor:
            out = torch.empty_like(x) if out is None else out
            COMPILED[f"sgl_kernel::{name}"](out, x, weight, eps, False)
            return out

        return run

    def add_norm(name: str) -> Callable[..., None]:
        def run(
            x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6, enable_pdl: Any = None
        ) -> None:
            COMPILED[f"sgl_kernel::{name}"](x, residual, weight, eps, False)

        return run

    for prefix in ("", "gemma_"):
        setattr(module, f"{prefix}rmsnorm", norm(f"{prefix}rmsnorm"))
        name = f"{prefix}fused_add_rmsnorm"
        setattr(module, name, add_norm(name))


def late_bound_math(module: Any) -> None:
    """The interpreter replaces tl.exp, but not a name that was bound to it before."""
    for name in ("exp", "log", "log2", "exp2"):
        setattr(module, name, lambda x, name=name: getattr(tl, name)(x))


def draft_ops(module: Any) -> None:
    choose_twins(module, twins.OF_OPS)
    # The class has bound some of them before.
    for name in twins.OF_OPS:
        if isinstance(vars(module.TritonOps).get(name), staticmethod):
            setattr(module.TritonOps, name, staticmethod(getattr(module, name)))


def draft_attention(module: Any) -> None:
    choose_twins(module, twins.OF_ATTENTION)


def replay_fold(module: Any) -> None:
    choose_twins(module, twins.OF_REPLAY)


def choose_twins(module: Any, named: dict[str, Callable[..., Any]]) -> None:
    """Let a variable choose between functions of a module and their twins."""

    def choosing(launch: Callable[..., Any], twin: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: (twin if os.environ.get(TWINS) else launch)(*args, **kwargs)

    for name, twin in named.items():
        setattr(module, name, choosing(getattr(module, name), twin))


def twins_of_sglang() -> dict[str, Hook]:
    """Kernels of hybrid targets; of most the plain-CPU platform has the torch code."""
    patches = [
        patch
        for patch in platform_cpu.PATCHES
        # Methods are called with tensors in `self`: they stay.
        if ".gdn_ops." in str(patch.ours) and patch.attribute != "forward"
    ]
    named: dict[str, dict[str, Callable[..., Any]]] = {
        f"{ATTENTION}.{module}": dict(slow) for module, slow in recurrent.SLOW.items()
    }
    for patch in patches:
        named.setdefault(patch.parent, {})[patch.attribute] = resolved(str(patch.ours))
    return {
        module: partial(choose_twins, named={name: function(run) for name, run in twins.items()})
        for module, twins in named.items()
    }


def resolved(name: str) -> Callable[..., Any]:
    """The function MODULE:NAME, imported when it is called."""
    module, _, function_name = name.partition(":")
    return lambda *args, **kwargs: getattr(importlib.import_module(module), function_name)(
        *args, **kwargs
    )


def parameters(module: Any) -> None:
    """The class of parameters that know how they are loaded."""
    module.BasevLLMParameter.__new__ = new_parameter


def internal_state(module: Any) -> None:
    """/server_info tells of the GPU, too."""
    owner = module.SchedulerInternalStateController
    add = owner._add_memory_usage

    def add_memory_usage(self: Any, state: dict[str, Any]) -> None:
        add(self, state)
        # SGLang's prefix cache is made of cycles, which hold memory until Python looks for them.
        gc.collect()
        state["fake_gpu"] = GPU.report()

    owner._add_memory_usage = add_memory_usage


def breakable_graphs(module: Any) -> None:
    """They ask the CUDA runtime whether a stream that was forked is captured."""
    module._is_stream_capturing = lambda stream: GPU.capture is not None


def pynccl(module: Any) -> None:
    module.PyNcclCommunicator = GlooCommunicator


ATTENTION = "sglang.kernels.ops.attention"
BREAKABLE = "sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph"
HOOKS: dict[str, Hook] = {
    "sglang.kernels.jit.utils.compile.loader": jit_loader,
    "flashinfer": flashinfer_attention,
    "flashinfer.cascade": flashinfer_cascade,
    "flashinfer.gdn_prefill": flashinfer_prefill,
    "flashinfer.norm": flashinfer_norms,
    "flashinfer.sampling": flashinfer_sampling,
    f"{ATTENTION}.fla.op": late_bound_math,
    f"{ATTENTION}.extend_attention": extend_attention,
    f"{ATTENTION}.decode_attention": decode_attention,
    "dflash_kernels.gated_delta_fold": replay_fold,
    "dflash_kernels.draft_ops": draft_ops,
    "dflash_kernels.draft_attention": draft_attention,
    "sglang.srt.distributed.device_communicators.pynccl": pynccl,
    f"{BREAKABLE}.breakable_cuda_graph": breakable_graphs,
    "sglang.srt.layers.parameter": parameters,
    "sglang.srt.managers.scheduler_components.internal_state": internal_state,
}


def install() -> None:
    """Replace compiled operators now, and what modules hold once they are imported."""
    for name, run in {**elementwise.OPERATORS, **sampling.OPERATORS}.items():
        COMPILED[f"sgl_kernel::{name}"] = kernel(run)
    COMPILED["sgl_kernel::fwd"] = attention.flash_attention_3
    COMPILED["sgl_kernel::weak_ref_tensor"] = lambda x: CudaTensor(x.host, x.device)
    COMPILED["sgl_kernel::get_scheduler_metadata"] = scheduler_metadata
    sys.meta_path.insert(0, AfterImport({**HOOKS, **twins_of_sglang()}))


def scheduler_metadata(*args: Any, **kwargs: Any) -> Tensor:
    """FlashAttention 3's schedule, which torch code does not read."""
    return CudaTensor(torch.zeros(1, dtype=torch.int32))
