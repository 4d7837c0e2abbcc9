"""Parts of the experiment `gpu` that compare: operations, attention, graphs and the fold kernel
against torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from experiments.device import milliseconds, recorder_for
from experiments.drafters import Load, Loaded, loaded, random_head, random_model
from sglang_dflash.drafting.attention.backend import (
    Capabilities,
    Setting,
    choose_attention,
    make_attention,
)
from sglang_dflash.drafting.attention.table import RequestSlots
from sglang_dflash.drafting.drafter import Drafter, TargetHead
from sglang_dflash.drafting.kv.ring import RingKVCache
from sglang_dflash.drafting.options import Options
from sglang_dflash.drafting.recurrent.replay import RecurrentLayers, VerifyInputs
from sglang_dflash.drafting.recurrent.replay import fold_ as torch_fold_
from sglang_dflash.drafting.self_check import check_attention, check_ops, check_recording
from sglang_dflash.drafting.weights import load_model
from sglang_dflash.facts.draft_config import DraftConfig
from sglang_dflash.facts.embedded import demo_pair
from sglang_dflash.facts.errors import ConfigError
from sglang_dflash.serving.gpu.backends import ATTENTION

# Requests in which recorded steps are compared; the check itself takes shorter ones.
CHECKED = Load(requests=4, context=256, window=None)


def self_check(config: DraftConfig, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """The start-up check of a server, for every attention backend.

    Returns:
        `ops`: the operations that were compared; `attention`: by backend "as torch", or why it does
        not run here; `failed` if one runs and differs, or breaks.
    """
    model = random_model(config, device, dtype)
    head, found, failed = random_head(model), {}, []
    with torch.no_grad():
        ops = check_ops(model, config.block_size)
        for name in ATTENTION:
            try:
                choose_attention(name, config, device, ATTENTION)
                one = loaded(model, head, CHECKED, name, device)
            # A package may be missing, or be for another GPU.
            except (ConfigError, ImportError) as error:
                found[name] = str(error)
                continue
            try:
                found[name] = _compare(one, ATTENTION[name].capabilities, device)
            # One backend that breaks must not hide what the others do.
            except Exception as error:
                found[name] = f"{type(error).__name__}: {error}"
                failed.append(f"{name}: {found[name]}")
    result: dict[str, Any] = {"ops": ops, "attention": found}
    return result | {"failed": "; ".join(failed)} if failed else result


def _compare(one: Loaded, can: Capabilities, device: torch.device) -> str:
    """Attention against torch's, and a recorded step against an eager one. Raises
    SelfCheckFailed."""
    drafter = one.drafter
    drafter.cache.clear()
    kv = drafter.cache.kv
    check_attention(drafter.model, drafter.block_size, drafter.attention, kv, can.scratch)
    if device.type == "cuda" and not can.capturable:
        return "as torch, not recorded"
    table = one.known.req_to_token
    graphed = one.graphed(recorder_for(device), table.shape[1])
    check_recording(drafter, graphed, table)
    if graphed.eager or not graphed.replays["propose"]:
        raise RuntimeError("the proposal that was to be compared had no recording")
    return "as torch, recorded as eager"


def proposals(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Drafted blocks `[R, B]` and their hidden states, of the demo draft for three requests.

    The random target hidden states are the same on every device.
    """
    pair, random = demo_pair("dense"), torch.Generator().manual_seed(0)
    model = load_model(str(pair.draft), dtype=dtype, device=device)
    resolved = Options(window=32).resolve(model.config)
    config, lengths = model.config, torch.tensor([5, 40, 77])

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=random).to(device, dtype)

    embed = normal(config.vocab_size, config.hidden_size)
    target_hidden = normal(int(lengths.sum()), config.target_hidden_width)
    seen: list[Tensor] = []

    def argmax(hidden: Tensor) -> Tensor:
        seen.append(hidden)
        return (hidden @ embed.T).argmax(-1)

    cache = RingKVCache(400, 400, config.kv_shape, dtype, device)
    attention = make_attention("torch", config, Setting(resolved.block_size, device))
    head = TargetHead(lambda ids: embed[ids], argmax)
    drafter = Drafter(model, head, cache, resolved, attention)
    positions = torch.cat([torch.arange(int(n)) for n in lengths]).to(device)
    rows = torch.arange(3, device=device).repeat_interleave(lengths.to(device))
    drafter.absorb(target_hidden, positions, rows * 100 + positions)
    slots = torch.arange(300, dtype=torch.int32, device=device).view(3, 100)
    requests = RequestSlots(slots, torch.arange(3, device=device), lengths.to(device), longest=77)
    blocks = drafter.propose(torch.tensor([1, 2, 3], device=device), requests)
    return blocks.cpu(), seen[0].float().cpu()


def against_cpu(device: torch.device) -> dict[str, Any]:
    """The demo draft on torch operations, against the CPU in float32: by dtype the largest error of
    hidden states, and the share of equal drafted tokens."""
    blocks, hidden = proposals(torch.device("cpu"), torch.float32)
    result = {}
    for dtype in (torch.float32, torch.bfloat16):
        got, states = proposals(device, dtype)
        error, equal = (states - hidden).abs().max().item(), (got == blocks).float().mean().item()
        result[str(dtype).removeprefix("torch.")] = {
            "largest_error": round(error, 6),
            "equal_tokens": round(equal, 4),
        }
    return result


def fold(
    device: torch.device, requests: int, block: int, depth: int, heads: int, dim: int
) -> dict[str, Any]:
    """Replay of recurrent layers (Gated DeltaNet): the kernel's error against torch, and its time
    beside a copy of snapshots.

    Args:
        depth: layers.
        heads: key heads; there are three times as many value heads.
        dim: of a head.
    """
    if device.type == "cuda":
        from dflash_kernels.gated_delta_fold import fold_
    else:
        fold_ = torch_fold_
    value_heads, width = 3 * heads, 4
    channels = 2 * heads * dim + value_heads * dim

    def normal(*size: int) -> Tensor:
        return torch.randn(depth, *size, device=device)

    layers = RecurrentLayers(
        normal(channels, width), None, "silu", normal(value_heads), normal(value_heads),
        heads, value_heads, dim, dim,
    )  # fmt: skip
    gates = normal(2, requests, block, value_heads).transpose(0, 1)
    kept = VerifyInputs(
        normal(requests, channels, width - 1), normal(requests, block, channels), *gates
    )
    states = normal(requests, value_heads, dim, dim)
    rows = torch.arange(requests, device=device)
    given = kept, rows, rows, rows, torch.full((requests,), block // 2, device=device)
    ours, twins = states.clone(), states.clone()
    fold_(layers, ours, *given)
    torch_fold_(layers, twins, *given)
    error = (ours - twins).abs().max().item()
    snapshots = states[:, :, None].expand(-1, -1, block, -1, -1, -1).contiguous()
    kernel_ms = milliseconds(device, lambda: fold_(layers, ours, *given), 20)
    copy_ms = milliseconds(
        device, lambda: states.copy_(snapshots[:, rows, given[-1] - 1]), 20
    )  # fmt: skip
    return {
        "largest_error": round(error, 6),
        "kernel_ms": round(kernel_ms, 4),
        "snapshot_copy_ms": round(copy_ms, 4),
        "state_bytes_read_and_written": 2 * states.nbytes,
    }
