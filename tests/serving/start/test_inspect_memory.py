"""`inspect` shows the memory that a server on a GPU reserves for draft steps."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from sglang_dflash.checkpoint.published import shipped
from sglang_dflash.drafting.attention.capabilities import choose_attention
from sglang_dflash.drafting.model import DraftModel
from sglang_dflash.drafting.options import Options, ResolvedOptions
from sglang_dflash.drafting.parallel import TensorParallel
from sglang_dflash.drafting.width import WidthPolicy
from sglang_dflash.memory.draft_memory import default_captures, headroom
from sglang_dflash.serving.gpu.backends import ATTENTION
from sglang_dflash.serving.start import memory
from sglang_dflash.serving.start.flags import ServerFlags, width_policy
from sglang_dflash.serving.start.plan import Plan
from sglang_dflash.tools.gpu_check.floors import config_of
from sglang_dflash.tools.inspect.report import inspect
from sglang_dflash.tools.inspect.serving import Serving
from tests.recording import OpRecorder

CUDA, REQUESTS = torch.device("cuda"), 24


class Pair(NamedTuple):
    """A published pair, its target as SGLang's `ModelConfig` describes it, and the target's
    attention backend."""

    target: str
    draft: str
    heads: int
    head_dim: int
    context: int
    attention: str


PAIRS = [
    Pair("Qwen/Qwen3-8B", "z-lab/Qwen3-8B-DFlash-b16", 32, 128, 40960, "triton"),
    Pair("Qwen/Qwen3.5-27B", "z-lab/Qwen3.5-27B-DFlash", 24, 256, 262_144, "flashinfer"),
]


def plan_of(pair: Pair, options: ResolvedOptions, policy: WidthPolicy, name: str, tp: int) -> Plan:
    """A server's, of a draft without memory."""
    ranks, before = TensorParallel(size=tp), torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            model = DraftModel(config_of(pair.draft), ranks)
    finally:
        torch.set_default_dtype(before)
    plan = Plan.of_draft(model, options, name, ATTENTION[name], REQUESTS)
    recorder = OpRecorder if plan.backend.capabilities.capturable else None
    return replace(plan, policy=policy, device=CUDA, recorder=recorder)


@pytest.fixture(autouse=True)
def _a_servers_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set what a server on an H100 has."""
    monkeypatch.setattr(memory, "captured_sizes", default_captures)
    monkeypatch.setattr(memory, "target_has_graphs", lambda _device: True)
    monkeypatch.setattr("sglang_dflash.serving.start.plan.processors_of", lambda _: 132)


@pytest.mark.parametrize(
    "asked", [Options(), Options(window=1024, sinks=4, looks_up=True)], ids=str
)
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("width", ["fixed", "adaptive"])
@pytest.mark.parametrize("name", [None, *ATTENTION])
@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.target)
def test_inspect_and_a_server_reserve_the_same(
    pair: Pair,
    name: str | None,
    width: str,
    tp: int,
    asked: Options,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = config_of(pair.draft)
    options = replace(asked.resolve(config), context=pair.context)
    serving = Serving(
        max_running_requests=REQUESTS, tp_size=tp, width=width, attention=name,
        target_attention=pair.attention,
    )  # fmt: skip
    target, draft = shipped("target")[pair.target], shipped("draft")[pair.draft]
    found = inspect(target, draft, asked, serving)

    settings: Any = SimpleNamespace(
        device="cuda", enable_deterministic_inference=False, enable_lora=False,
        linear_attn_decode_backend=None, linear_attn_backend="triton",
        linear_attn_verify_backend=None,
    )  # fmt: skip
    monkeypatch.setattr(ServerFlags, "of", classmethod(lambda cls, _: cls(width=width)))
    policy = width_policy(None, settings, options)
    chosen = choose_attention(name, config, "cuda", "bfloat16")
    monkeypatch.setattr(memory, "attention_backends", lambda: (pair.attention, pair.attention))
    monkeypatch.setattr(memory, "table_positions", lambda n: n + headroom(options.verify_block))
    monkeypatch.setattr(memory, "get_parallel", lambda: SimpleNamespace(attn_tp_size=tp))
    model_config: Any = SimpleNamespace(
        context_len=pair.context,
        head_dim=pair.head_dim,
        get_num_attention_heads=lambda ranks: pair.heads // ranks,
    )
    plan = plan_of(pair, options, policy, chosen, tp)
    needed = memory.draft_reservation(plan, model_config).needed
    assert found["draft_step_bytes"] == needed.total
    assert found["draft_memory_bytes"] == needed.as_report()
    assert (needed.narrow_widths > 0) == (needed.waiting_hidden > 0) == (width == "adaptive")
    # A cache is allocated by the network's own shape.
    of_network = math.prod(plan.model.kv_shape) * torch.bfloat16.itemsize
    charged = sum(group.token_bytes for group in plan.draft_kv(REQUESTS))
    assert found["draft_kv_bytes_per_token"] == charged == of_network
