"""An independent drafter, in the dtype of its weights: dense attention over the whole request.

It drafts one block at a time, reads a checkpoint by its published tensor names and shares no code
with the product.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def rope(x: Tensor, positions: list[int], theta: float) -> Tensor:
    """x [n, heads, d]: pairs (i, i + d/2) rotated by position * theta^(-2i/d)."""
    half = x.shape[-1] // 2
    out = torch.empty_like(x)
    for i in range(half):
        for n, position in enumerate(positions):
            angle = position * theta ** (-2 * i / x.shape[-1])
            a, b = x[n, :, i], x[n, :, i + half]
            out[n, :, i] = a * math.cos(angle) - b * math.sin(angle)
            out[n, :, i + half] = b * math.cos(angle) + a * math.sin(angle)
    return out


def sees(
    kind: str,
    raw: dict[str, Any],
    query: int,
    key: int,
    length: int,
    window: int | None,
    sinks: int,
) -> bool:
    """Return whether block position `query` sees position `key` after `length` committed tokens."""
    own = raw["dflash_config"]
    causal = raw.get("is_causal", own.get("causal", own.get("causal_head")))
    if own.get("use_swa"):
        causal = bool(causal)
        kind, raw = "sliding_attention", {"sliding_window": own["swa_window_size"]}
    if causal is None:
        causal = kind == "sliding_attention"
    if key < length and window is not None and key < length - window and key >= sinks:
        return False
    if kind == "sliding_attention" and query - key >= raw["sliding_window"]:
        return False
    return key < length or not causal or key <= query


def convolved(t: dict[str, Tensor], name: str, x: Tensor) -> tuple[Tensor, Any]:
    """x [block, E] under a grouped convolution, and the function of the sublayer's output."""
    if f"{name}.base_kernel" not in t:
        return x, lambda out: out
    base, projection = t[f"{name}.base_kernel"], t[f"{name}.kernel_projection.weight"]
    _, taps, width = base.shape
    dynamic = (x @ projection.T).view(len(x), 2, taps, -1)
    channels = width // dynamic.shape[-1]

    def apply(side: int, values: Tensor) -> Tensor:
        out = torch.zeros_like(values)
        for b in range(len(values)):
            for tap in range(min(taps, b + 1)):
                for c in range(width):
                    kernel = base[side, tap, c] + dynamic[b, side, tap, c // channels]
                    out[b, c] += kernel * values[b - tap, c]
        return out

    return apply(0, x), lambda out: apply(1, out)


def walk(
    tensors: dict[str, Tensor], hidden: Tensor, logits: Tensor, bonus: int, top_k: int
) -> list[int]:
    """The tokens that a candidate selector takes, of hidden states [P, E] and logits [P, V]."""
    name, path = "candidate_selector.", [bonus]
    before, after = (tensors[f"{name}{which}_codebook"] for which in ("predecessor", "successor"))
    for h, row in zip(hidden, logits, strict=True):
        query = before[path[-1]] * (tensors[f"{name}hidden_projection.weight"] @ h)
        candidates = row.argsort(descending=True)[:top_k].tolist()
        path.append(max(candidates, key=lambda c: float(row[c] + query @ after[c])))
    return path[1:]


def draft_block(
    tensors: dict[str, Tensor],
    raw: dict[str, Any],
    target_hidden: Tensor,
    bonus: int,
    embed: Tensor,
    block: int,
    window: int | None = None,
    sinks: int = 0,
    lost: dict[str, set[int]] | None = None,
) -> tuple[Tensor, list[int]]:
    """Hidden states [block, E] and tokens of the block, given `target_hidden` [T, F * E], and by
    the kind of layer the positions whose K/V is lost."""
    heads, groups = raw["num_attention_heads"], raw["num_key_value_heads"]
    dim, eps = raw["head_dim"], raw["rms_norm_eps"]
    length = len(target_hidden)
    context = rms(target_hidden @ tensors["fc.weight"].T, tensors["hidden_norm.weight"], eps)
    ids = [bonus] + [raw["dflash_config"]["mask_token_id"]] * (block - 1)
    x = embed[ids]
    positions = list(range(length + block))
    kinds = raw.get("layer_types") or ["full_attention"] * raw["num_hidden_layers"]
    for i, kind in enumerate(kinds):
        t = {
            k.removeprefix(f"layers.{i}."): v
            for k, v in tensors.items()
            if k.startswith(f"layers.{i}.")
        }
        h = rms(x, t["input_layernorm.weight"], eps)
        h, after = convolved(t, "attention_conv", h)
        sequence = torch.cat([context, h])
        bias = {name: t.get(f"self_attn.{name}_proj.bias", 0.0) for name in "qkvo"}
        q = (h @ t["self_attn.q_proj.weight"].T + bias["q"]).view(block, heads, dim)
        k = (sequence @ t["self_attn.k_proj.weight"].T + bias["k"]).view(-1, groups, dim)
        v = (sequence @ t["self_attn.v_proj.weight"].T + bias["v"]).view(-1, groups, dim)
        q = rope(rms(q, t["self_attn.q_norm.weight"], eps), positions[length:], raw["rope_theta"])
        k = rope(rms(k, t["self_attn.k_norm.weight"], eps), positions, raw["rope_theta"])
        out = torch.zeros(block, heads, dim, dtype=x.dtype)
        for b in range(block):
            allowed = [
                p for p in positions if sees(kind, raw, length + b, p, length, window, sinks)
                and p not in (lost or {}).get(kind, ())
            ]  # fmt: skip
            for head in range(heads):
                scores = k[allowed, head // (heads // groups)] @ q[b, head] / math.sqrt(dim)
                out[b, head] = scores.softmax(0) @ v[allowed, head // (heads // groups)]
        x = x + after(out.flatten(1) @ t["self_attn.o_proj.weight"].T + bias["o"])
        h, after = convolved(t, "mlp_conv", rms(x, t["post_attention_layernorm.weight"], eps))
        gate, up = h @ t["mlp.gate_proj.weight"].T, h @ t["mlp.up_proj.weight"].T
        x = x + after((gate * torch.sigmoid(gate) * up) @ t["mlp.down_proj.weight"].T)
    hidden = rms(x, tensors["norm.weight"], eps)
    if "selector_top_k" in raw["dflash_config"]:
        top_k = raw["dflash_config"]["selector_top_k"]
        return hidden, [bonus, *walk(tensors, hidden[1:], hidden[1:] @ embed.T, bonus, top_k)]
    if "d2t" in tensors:
        rows = (hidden[1:] @ tensors["lm_head.weight"].T).argmax(-1).tolist()
        return hidden, [bonus, *(row + int(tensors["d2t"][row]) for row in rows)]
    return hidden, [bonus, *(hidden[1:] @ embed.T).argmax(-1).tolist()]
