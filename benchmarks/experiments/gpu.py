"""What a bare GPU can show without SGLang: drafter, its cache under load, fold kernel, loop.

Needs torch with CUDA, triton and transformers. Run it from a checkout, with PYTHONPATH=.:kernels.
The exit status is 1 if a part failed; the other parts' figures are reported.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.runner import Arms, Experiment, NoOptions, Progress, case_by_case
from sglang_dflash.checkpoint.draft_config import DraftConfig
from sglang_dflash.checkpoint.embedded import demo_pair
from sglang_dflash.core.attention.backend import Setting, make_attention
from sglang_dflash.core.attention.table import RequestSlots
from sglang_dflash.core.drafter import Drafter, TargetHead
from sglang_dflash.core.kv_cache.ring import RingKVCache
from sglang_dflash.core.model import DraftModel
from sglang_dflash.core.options import Options
from sglang_dflash.core.recurrent.replay import RecurrentLayers, VerifyInputs
from sglang_dflash.core.recurrent.replay import fold_ as torch_fold_
from sglang_dflash.core.weights import load_model

# A draft of Qwen3-8B's geometry, with random weights.
LARGE = {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 5,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "block_size": 16,
    "num_target_layers": 36,
    "max_position_embeddings": 40960,
    "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
}
# Its target.
LARGE_TARGET = {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
}


def proposals(device: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Drafted blocks `[R, B]` and their hidden states, of the demo draft for three requests.

    The random target hidden states are the same on every device.
    """
    pair, random = demo_pair("dense"), torch.Generator().manual_seed(0)
    model, options = load_model(str(pair.draft), dtype=dtype, device=device), Options(window=32)
    resolved, lengths = options.resolve(model.config), torch.tensor([5, 40, 77])
    config = model.config

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=random).to(device, dtype)

    embed = normal(config.vocab_size, config.hidden_size)
    target_hidden = normal(int(lengths.sum()), config.target_hidden_width)
    seen: list[Tensor] = []

    def argmax(hidden: Tensor) -> Tensor:
        seen.append(hidden)
        return (hidden @ embed.T).argmax(-1)

    cache = RingKVCache(400, 400, config.kv_shape, dtype, device)
    attention = make_attention("torch", config, Setting(resolved.block_size, torch.device(device)))
    head = TargetHead(lambda ids: embed[ids], argmax)
    drafter = Drafter(model, head, cache, resolved, attention)
    positions = torch.cat([torch.arange(int(n)) for n in lengths]).to(device)
    rows = torch.arange(3, device=device).repeat_interleave(lengths.to(device))
    drafter.absorb(target_hidden, positions, rows * 100 + positions)
    slots = torch.arange(300, dtype=torch.int32, device=device).view(3, 100)
    requests = RequestSlots(slots, torch.arange(3, device=device), lengths.to(device), longest=77)
    blocks = drafter.propose(torch.tensor([1, 2, 3], device=device), requests)
    return blocks.cpu(), seen[0].float().cpu()


def drafter_against_cpu(device: str) -> dict[str, Any]:
    """By dtype: largest error of hidden states, and share of equal drafted tokens.

    Both against the CPU in float32.
    """
    blocks, hidden = proposals("cpu", torch.float32)
    result = {}
    for dtype in (torch.float32, torch.bfloat16):
        got, states = proposals(device, dtype)
        error, equal = (states - hidden).abs().max().item(), (got == blocks).float().mean().item()
        result[str(dtype).removeprefix("torch.")] = {
            "largest_error": round(error, 6),
            "equal_tokens": round(equal, 4),
        }
    return result


def cache_under_load(
    device: str, requests: int = 32, window: int = 1024, steps: int = 20
) -> dict[str, Any]:
    """Absorb and propose for 32 requests while a synchronization is an error.

    Also the bytes of the cache, as allocated and as computed.
    """
    config = DraftConfig.from_dict(LARGE)
    options = Options(window=window, sinks=4).resolve(config)
    block, model = options.block_size, DraftModel(config).to(device, torch.bfloat16).freeze()
    slots = options.draft_kv_entries(requests)
    before = torch.cuda.memory_allocated()
    cache = RingKVCache(slots, requests * 4096, config.kv_shape, torch.bfloat16, device)
    allocated = torch.cuda.memory_allocated() - before
    embed = torch.randn(config.vocab_size, config.hidden_size, device=device, dtype=torch.bfloat16)
    drafter = Drafter(
        model,
        TargetHead(lambda ids: embed[ids], lambda hidden: (hidden @ embed.T).argmax(-1)),
        cache,
        options,
        make_attention("torch", config, Setting(block, torch.device(device))),
    )
    slots_of = torch.arange(requests * 4096, dtype=torch.int32, device=device).view(requests, -1)
    row = torch.arange(requests, device=device)
    lengths, longest = torch.full((requests,), 2000, device=device), 2000
    target_hidden = torch.randn(
        requests * block, config.target_hidden_width, device=device, dtype=torch.bfloat16
    )
    keep = (torch.arange(block, device=device) < 5).repeat(requests)
    times = []
    for step in range(steps):
        torch.cuda.synchronize()
        # The first step compiles and allocates.
        torch.cuda.set_sync_debug_mode("error" if step else "default")
        began = time.perf_counter()
        drafter.propose(lengths % 1000, RequestSlots(slots_of, row, lengths, longest))
        new = lengths[:, None] + torch.arange(block, device=device)
        drafter.absorb(target_hidden, new.flatten(), (4096 * row[:, None] + new).flatten(), keep)
        lengths, longest = lengths + 5, longest + 5
        torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    # K and V of two bytes per value, and one more slot for padding.
    per_slot = config.num_hidden_layers * 2 * config.num_key_value_heads * config.head_dim * 2
    return {
        "requests": requests,
        "window": window,
        "draft_kv_entries": slots,
        "steps_with_synchronisation_an_error": len(times) - 1,
        "draft_kv_bytes_computed": (slots + 1) * per_slot,
        "draft_kv_bytes": cache.nbytes,
        "allocated_with_bookkeeping": allocated,
        "propose_and_absorb_ms": round(1000 * sorted(times[1:])[len(times) // 2], 3),
    }


def fold_kernel(device: str, requests: int = 8, block: int = 16, depth: int = 48) -> dict[str, Any]:
    """All layers of Qwen3.5-27B's shape: the kernel's error against torch, and its time.

    Beside the time: the bytes that it must move, and the time of a copy of snapshots.
    """
    import triton
    from dflash_kernels.gated_delta_fold import fold_

    heads, value_heads, dim, width = 16, 48, 128, 4
    channels = 2 * heads * dim + value_heads * dim

    def normal(*size: int) -> Tensor:
        return torch.randn(depth, *size, device=device)

    layers = RecurrentLayers(
        normal(channels, width),
        None,
        "silu",
        normal(value_heads),
        normal(value_heads),
        heads,
        value_heads,
        dim,
        dim,
    )
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
    kernel_ms = triton.testing.do_bench(lambda: fold_(layers, ours, *given))
    copy_ms = triton.testing.do_bench(lambda: states.copy_(snapshots[:, rows, given[-1] - 1]))
    floor = 2 * states.nbytes
    return {
        "largest_error": round(error, 6),
        "kernel_ms": round(kernel_ms, 4),
        "snapshot_copy_ms": round(copy_ms, 4),
        "kernel_over_copy": round(kernel_ms / copy_ms, 3),
        "state_bytes_read_and_written": floor,
        "tb_per_s": round(floor / kernel_ms / 1e9, 3),
    }


def transformers_loop(device: str) -> dict[str, Any]:
    """The demo pair over Transformers in float32, against `generate`.

    Identical outputs, acceptance length and tokens per second.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from sglang_dflash.hf.generation import spec_generate

    pair = demo_pair("dense")
    target: Any = AutoModelForCausalLM.from_pretrained(pair.target, dtype=torch.float32).eval()
    target.to(device)
    draft = load_model(str(pair.draft), dtype=torch.float32, device=device)
    tokenizer = AutoTokenizer.from_pretrained(pair.target)
    same, committed, seconds = 0, [], {"plain": 0.0, "dflash": 0.0}
    for prompt in pair.prompts[:8]:
        ids = tokenizer(prompt, return_tensors="pt").input_ids.to(device)
        began = time.perf_counter()
        whole = target.generate(ids, max_new_tokens=128, min_new_tokens=128, do_sample=False)
        plain = whole[0, ids.shape[1] :].tolist()
        seconds["plain"] += time.perf_counter() - began
        began = time.perf_counter()
        ours = spec_generate(draft, target, ids, 128)
        seconds["dflash"] += time.perf_counter() - began
        same += plain == ours.tokens
        committed += ours.committed
    rates = {f"{name}_tok_s": round(8 * 128 / value, 1) for name, value in seconds.items()}
    return {
        "identical": same,
        "of": 8,
        "acceptance_length": round(sum(committed) / len(committed), 3),
        **rates,
    }


def large_pair_loop(
    device: str,
    target_shape: dict[str, Any] = LARGE_TARGET,
    draft_shape: dict[str, Any] = LARGE,
    new_tokens: int = 64,
) -> dict[str, Any]:
    """What a step of `spec_generate` costs, on random weights of Qwen3-8B's shape.

    bfloat16, batch 1, without prefill. Drafts are accepted only by chance, so the tokens per second
    are the worst case.
    """
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from sglang_dflash.hf.generation import prefill, spec_generate

    torch.manual_seed(0)
    with torch.device(device):
        network: Any = Qwen3ForCausalLM(Qwen3Config(**target_shape, dtype="bfloat16"))
        target = network.to(torch.bfloat16).eval()
        draft = DraftModel(DraftConfig.from_dict(draft_shape)).to(torch.bfloat16).freeze()
        ids = torch.randint(1000, (1, 512))

    def plain(count: int) -> Any:
        return target.generate(ids, max_new_tokens=count, min_new_tokens=count, do_sample=False)

    start = prefill(draft, target, ids)
    for warm in (lambda: plain(2), lambda: spec_generate(draft, target, start, 4)):
        warm()
    _, first = _timed(device, lambda: plain(1))
    _, whole = _timed(device, lambda: plain(new_tokens))
    ours, seconds = _timed(device, lambda: spec_generate(draft, target, start, new_tokens))
    per_token = (whole - first) / (new_tokens - 1)
    steps = len(ours.committed)
    return {
        "weights": "random",
        "dtype": "bfloat16",
        "prompt_tokens": ids.shape[1],
        "new_tokens": new_tokens,
        "plain_tok_s": round(1 / per_token, 1),
        "dflash_tok_s": round(new_tokens / seconds, 1),
        "acceptance_length": round(sum(ours.committed) / steps, 3),
        "plain_ms_per_token": round(1000 * per_token, 2),
        "dflash_ms_per_step": round(1000 * seconds / steps, 2),
    }


def _timed(device: str, run: Callable[[], Any]) -> tuple[Any, float]:
    """The result of `run`, and its time in seconds."""

    def synchronize() -> None:
        if torch.device(device).type == "cuda":
            torch.cuda.synchronize()

    synchronize()
    began = time.perf_counter()
    result = run()
    synchronize()
    return result, time.perf_counter() - began


def workload(_: Arms, __: NoOptions, progress: Progress) -> dict[str, dict[str, Any]]:
    torch.backends.cuda.matmul.allow_tf32 = False

    def measure(name: str, part: Callable[[str], dict[str, Any]]) -> dict[str, Any]:
        try:
            with torch.inference_mode():
                figures = part("cuda")
        except Exception as error:
            # GPU machines are lent for minutes: one failed part must not cost the others' figures.
            figures = {"failed": f"{type(error).__name__}: {error}"}
        # At once: the machine may be taken away before the last part is done.
        print(name, json.dumps(figures), flush=True)
        return figures

    return case_by_case(PARTS, measure, progress)


def report(figures: dict[str, dict[str, Any]], _: NoOptions) -> dict[str, Any]:
    return figures


def failure(result: dict[str, Any]) -> str | None:
    failed = [name for name in PARTS if "failed" in result[name]]
    return f"failed: {', '.join(failed)}" if failed else None


PARTS: dict[str, Callable[[str], dict[str, Any]]] = {
    part.__name__: part
    for part in (
        drafter_against_cpu,
        cache_under_load,
        fold_kernel,
        transformers_loop,
        large_pair_loop,
    )
}

EXPERIMENT = Experiment(
    name="gpu",
    description=__doc__,
    workload=workload,
    report=report,
    failure=failure,
)
