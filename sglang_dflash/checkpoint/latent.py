"""The K/V of a target with multi-head latent attention (MLA), from its config.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sglang_dflash.checkpoint.fields import Fields

# Architectures whose layers may have an indexer of sparse attention (DSA): SGLang's
# `is_deepseek_dsa`, as far as a DFLASH worker serves them.
INDEXED = (
    "DeepseekV32ForCausalLM", "DeepseekV3ForCausalLM", "DeepseekV3ForCausalLMNextN",
    "Glm5NextForConditionalGeneration", "Glm5NextForConditionalGenerationNextN",
    "GlmMoeDsaForCausalLM", "GlmMoeDsaForCausalLMNextN", "MistralLarge3ForCausalLM",
)  # fmt: skip
# Numbers in 8 bits that share a scale of 4 bytes.
SCALED, SCALE_BYTES = 128, 4


@dataclass(frozen=True)
class Latent:
    """The numbers of a token that MLA keeps in place of K and V.

    Attributes:
        compressed: of K and V together, per layer.
        rotary: of the rotary key, per layer.
        indexers: layers with an indexer of sparse attention; 0 if the target has none.
        index_bytes: of an indexer's key, with its scales.
    """

    compressed: int
    rotary: int
    indexers: int = 0
    index_bytes: int = 0


def read_latent(raw: Mapping[str, Any], text: Fields, depth: int) -> Latent | None:
    """The latent of a target with so many layers; None without MLA. Raises ConfigError."""
    if "kv_lora_rank" not in text:
        return None
    latent = text.positive_int("kv_lora_rank"), text.positive_int("qk_rope_head_dim")
    names = raw.get("architectures")
    is_named = isinstance(names, list) and any(name in INDEXED for name in names)
    if not is_named or "index_topk" not in text:
        return Latent(*latent)
    width, pooled = text.positive_int("index_head_dim"), text.positive_int("index_kpool", default=1)
    key_bytes = width + width // SCALED * SCALE_BYTES
    layers = (layer for layer in _attention(text, depth) if _has_indexer(text, layer))
    return Latent(*latent, indexers=sum(1 for _ in layers), index_bytes=-(-key_bytes // pooled))


def _attention(text: Fields, depth: int) -> Sequence[int]:
    """The layers that keep K/V: all, or those of a GLM-5 Next without linear attention."""
    types = text.layer_types(depth)
    if types is not None:
        return [layer for layer, name in enumerate(types) if name != "linear_attention"]
    linear = text.block("linear_attn_config").get("kda_layers", ())
    return [layer for layer in range(depth) if layer not in linear]


def _has_indexer(text: Fields, layer: int) -> bool:
    """Return whether a layer does not share the indexer of one before it: the negation of SGLang's
    `dsa_layer_skips_topk`."""
    if "indexer_types" in text:
        return text.words("indexer_types")[layer : layer + 1] != ("shared",)
    if "index_topk_pattern" in text:
        return (text.word("index_topk_pattern") or "")[layer : layer + 1] != "S"
    first = text.positive_int("index_skip_topk_offset", default=2) - 1
    return max(layer - first, 0) % text.positive_int("index_topk_freq", default=1) == 0
