"""--speculative-draft-attention-backend: what it may name, what unset means, what is refused."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from dflash_kernels.draft_ops import TritonOps
from sglang.srt.arg_groups.overrides import resolving_view

from sglang_dflash.checkpoint.draft_config import DraftConfig
from sglang_dflash.drafting.attention.capabilities import choose_attention
from sglang_dflash.drafting.ops import TorchOps
from sglang_dflash.serving.gpu.backends import (
    asked_attention,
    check_kv_dtype,
    check_model_dtype,
    draft_ops,
)
from tests.conftest import raw_config
from tests.errors import refused
from tests.serving.fake_cuda import FakeCuda
from tests.serving.published import (
    BACKEND_FLAGS,
    LINE,
    flags,
    local,
    needs_plain_cpu,
    on_this_machine,
)

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
FLAG = BACKEND_FLAGS[1]


def config(**changes: Any) -> DraftConfig:
    return DraftConfig.from_dict(raw_config(**changes))


@pytest.mark.parametrize(
    ("device", "head_dim", "chosen"),
    [(CPU, 16, "torch"), (CUDA, 128, "triton"), (CUDA, 80, "torch")],
    ids=["cpu", "cuda", "a-head-dim-without-a-kernel"],
)
def test_unset_takes_the_best_that_can_serve(
    device: torch.device, head_dim: int, chosen: str
) -> None:
    assert choose_attention(None, config(head_dim=head_dim), device.type) == chosen


ONE_DTYPE = ("fa3", "fa4")
# Name, device and dtype of draft K/V, and what can run instead.
IMPOSSIBLE = [
    *(
        (name, CPU, None, "runs on cuda, not on cpu", "['torch']")
        for name in ("triton", *ONE_DTYPE)
    ),
    ("flash", CUDA, None, "unknown", "['triton', 'torch', 'fa3', 'fa4']"),
    *(
        (name, CUDA, dtype, f"not in {str(dtype)[6:]}", "['triton', 'torch']")
        for name in ONE_DTYPE
        for dtype in (torch.float8_e4m3fn, torch.float32)
    ),
]


@pytest.mark.parametrize(("name", "device", "dtype", "reason", "instead"), IMPOSSIBLE)
def test_an_impossible_choice_names_what_can_run(
    name: str, device: torch.device, dtype: torch.dtype | None, reason: str, instead: str
) -> None:
    wide = config(head_dim=128)
    with refused("attention", name) as error:
        choose_attention(name, wide, device.type, dtype and str(dtype)[6:])
    assert reason in error.value.required and error.value.required.endswith(instead)
    if dtype is not None:
        choose_attention(name, wide, device.type, "bfloat16")


@pytest.mark.parametrize(
    ("capability", "dtype", "served"),
    [
        ((8, 0), torch.float8_e4m3fn, False),
        ((8, 6), torch.float8_e4m3fn, False),
        ((8, 9), torch.float8_e4m3fn, True),
        ((12, 0), torch.float8_e4m3fn, True),
        ((8, 0), torch.bfloat16, True),
        ((8, 0), torch.float8_e5m2, True),
    ],
)
def test_8_bit_draft_kv_by_gpu(
    capability: tuple[int, int], dtype: torch.dtype, served: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    check_kv_dtype(dtype, CPU)
    if served:
        check_kv_dtype(dtype, CUDA)
        return
    with refused("--speculative-draft-kv-cache-dtype") as error:
        check_kv_dtype(dtype, CUDA)
    assert "8.9 or later" in error.value.required


def test_operations_by_device() -> None:
    assert type(draft_ops(CPU)) is TorchOps and isinstance(draft_ops(CUDA), TritonOps)
    # None of torch's is left by accident.
    assert {name for name in vars(TorchOps) if name[0] != "_"} <= set(vars(TritonOps))


@needs_plain_cpu
@pytest.mark.parametrize(
    ("given", "asked"), [([], None), ([FLAG, "torch"], "torch"), ([FLAG, "torch_native"], "torch")]
)
def test_what_was_given_is_read_and_not_what_sglang_makes_of_it(
    given: list[str], asked: str | None, resolve: Any, folders: Any
) -> None:
    server_args = resolve([*on_this_machine(local(flags(LINE), folders)), *given])
    assert asked_attention(server_args) == asked
    resolved = resolving_view(server_args).speculative_draft_attention_backend
    assert resolved == "torch_native"


def test_models_whose_dtype_sglangs_kernels_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    """A real GPU's refuse float32, in these words; the faked one's do not."""

    def refuses(x: torch.Tensor, weight: torch.Tensor) -> None:
        assert x.is_cuda and weight.is_cuda and x.dtype == weight.dtype
        raise RuntimeError("rmsnorm(...)::<lambda()> failed to dispatch data type Float")

    monkeypatch.setitem(sys.modules, "sgl_kernel", SimpleNamespace(rmsnorm=refuses))
    with FakeCuda():
        check_model_dtype(torch.bfloat16, CUDA)
        check_model_dtype(torch.float32, CPU)
        with refused("--dtype", "float32"):
            check_model_dtype(torch.float32, CUDA)
        monkeypatch.setattr(sys.modules["sgl_kernel"], "rmsnorm", lambda *_: None)
        check_model_dtype(torch.float32, CUDA)
