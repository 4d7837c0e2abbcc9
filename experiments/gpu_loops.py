"""Parts of the experiment `gpu` that decode over Transformers."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from sglang_dflash.drafting.model import DraftModel
from sglang_dflash.drafting.weights import load_model
from sglang_dflash.facts.draft_config import DraftConfig
from sglang_dflash.facts.embedded import demo_pair

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
LARGE_PAIR = (LARGE_TARGET, LARGE)
# For trying the command on any machine.
_SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4,
          "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 1024}  # fmt: skip
TINY_PAIR = (
    {**LARGE_TARGET, **_SMALL, "num_hidden_layers": 3},
    {**LARGE, **_SMALL, "num_hidden_layers": 2, "num_target_layers": 3, "block_size": 4,
     "dflash_config": {"mask_token_id": 1023, "target_layer_ids": [0, 2]}},
)  # fmt: skip


def demo_loop(device: torch.device, prompts: int, new_tokens: int) -> dict[str, Any]:
    """The demo pair over Transformers in float32, against `generate`: identical outputs, acceptance
    length and tokens per second, over the first `prompts` of its texts."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from sglang_dflash.transformers_loop.generation import spec_generate

    pair = demo_pair("dense")
    target: Any = AutoModelForCausalLM.from_pretrained(pair.target, dtype=torch.float32).eval()
    target.to(device)
    draft = load_model(str(pair.draft), dtype=torch.float32, device=device)
    tokenizer = AutoTokenizer.from_pretrained(pair.target)
    same, committed, seconds = 0, [], {"plain": 0.0, "dflash": 0.0}
    for prompt in pair.prompts[:prompts]:
        ids = tokenizer(prompt, return_tensors="pt").input_ids.to(device)
        began = time.perf_counter()
        whole = target.generate(
            ids, max_new_tokens=new_tokens, min_new_tokens=new_tokens, do_sample=False
        )
        plain = whole[0, ids.shape[1] :].tolist()
        seconds["plain"] += time.perf_counter() - began
        began = time.perf_counter()
        ours = spec_generate(draft, target, ids, new_tokens)
        seconds["dflash"] += time.perf_counter() - began
        same += plain == ours.tokens
        committed += ours.committed
    rates = {
        f"{name}_tok_s": round(prompts * new_tokens / value, 1) for name, value in seconds.items()
    }
    return {
        "identical": same,
        "of": prompts,
        "acceptance_length": round(sum(committed) / len(committed), 3),
        **rates,
    }


def large_pair_loop(
    device: torch.device,
    target_shape: dict[str, Any],
    draft_shape: dict[str, Any],
    new_tokens: int,
) -> dict[str, Any]:
    """What a step of `spec_generate` costs, on random weights of Qwen3-8B's shape.

    bfloat16, batch 1, without prefill. Drafts are accepted only by chance, so the tokens per second
    are the worst case.
    """
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from sglang_dflash.transformers_loop.generation import prefill, spec_generate

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


def _timed(device: torch.device, run: Callable[[], Any]) -> tuple[Any, float]:
    """The result of `run`, and its time in seconds."""

    def synchronize() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    synchronize()
    began = time.perf_counter()
    result = run()
    synchronize()
    return result, time.perf_counter() - began
