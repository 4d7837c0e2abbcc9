"""The precision that a target and its draft are said to have: a draft is trained, or calibrated, on
the hidden states of one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from sglang_dflash.checkpoint.quantization import NAMES

# Words in names and configs -> the precision; the first that matches counts. 16 bits have none.
_SAID = (
    (r"mxfp4", "MXFP4"),
    (r"fp4", "NVFP4"),
    (r"fp8|float-quantized", "FP8"),
    (r"w8a8|int8|int-quantized", "INT8"),
    (r"w4a16|int4|4bit|awq|gptq|pack-quantized", "INT4"),
)
_FIELDS = ("quant_method", "format", "quant_algo")


def quantization_section(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the section of a parsed config.json that tells how weights are stored, of the model or
    of its language model; empty if they are plain."""
    models = [model for model in (raw, raw.get("text_config")) if isinstance(model, Mapping)]
    sections = (model.get(name) for model in models for name in NAMES)
    return next((section for section in sections if isinstance(section, Mapping) and section), {})


def asks_fp8_kv(raw: Mapping[str, Any]) -> bool:
    """Return whether a target's parsed config.json asks for K/V in FP8, by the keys that SGLang
    reads: those of ModelOpt."""
    section = quantization_section(raw)
    scheme, algorithm = section.get("kv_cache_scheme"), section.get("kv_cache_quant_algo")
    if "quant_algo" in section and isinstance(scheme, Mapping):
        return (scheme.get("type"), scheme.get("num_bits")) == ("float", 8)
    return str(algorithm).upper() == "FP8"


def precision(name: str, raw: Mapping[str, Any]) -> str | None:
    """Return a model's precision by its name, or else by the weights' format in its parsed
    config.json; None for 16 bits."""
    section = quantization_section(raw)
    texts = name.rstrip("/").rpartition("/")[2], " ".join(str(section.get(key)) for key in _FIELDS)
    for text in texts:
        for pattern, label in _SAID:
            if re.search(pattern, text.casefold()):
                return label
    return None


def other_precision(
    target: str, of_target: Mapping[str, Any], draft: str, of_draft: Mapping[str, Any]
) -> list[str]:
    """A warning if the draft is said to have another precision than the target.

    Args:
        target, draft: their names.
        of_target, of_draft: their parsed config.json.
    """
    draft_precision, target_precision = precision(draft, of_draft), precision(target, of_target)
    if draft_precision in (None, target_precision):
        return []
    return [
        f"draft {draft} is said to be in {draft_precision}, target {target} in "
        f"{target_precision or '16 bits'}: a draft that was made for the hidden states of another "
        "precision may be of no use (of one for NVFP4, 62 % of drafts were seen to be accepted "
        "with that target, and 0 % with the same in FP8); outputs stay exact, and sglang-dflash "
        "doctor tells how many are accepted"
    ]
