"""The policy of verify widths that the flags name, and what it cannot serve."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sglang_dflash.drafting.width import AdaptiveWidth, FixedWidth, WidthPolicy
from sglang_dflash.facts.errors import ConfigError
from sglang_dflash.serving.start import flags

WIDTH_FLAG, WIDTHS_FLAG = "--speculative-dflash-width", "--speculative-dflash-widths"
# Widths below the block size that are tried by default.
DEFAULT_WIDTHS = (1, 4, 8)


def width_policy(server_args: Any, settings: Any, block_size: int) -> WidthPolicy:
    """The policy that the flags name.

    `auto` is `adaptive` on a plain CPU, unless a setting excludes it, and `fixed` elsewhere.

    Args:
        settings: SGLang's, resolved.
        block_size: B.

    Raises:
        ConfigError: the widths do not fit the block size, or are given with a fixed width; or
            `adaptive` is given with a setting that excludes it.
    """
    ours = flags.ServerFlags.of(server_args)
    kind, widths = ours.width, ours.listed_widths()
    excluded = _excluded(settings)
    if kind == "adaptive" and excluded is not None:
        raise ConfigError(WIDTH_FLAG, kind, excluded)
    if kind == "auto":
        kind = "adaptive" if excluded is None and _device(settings) == "cpu" else "fixed"
    if kind == "adaptive":
        return AdaptiveWidth(_checked(widths, block_size))
    if widths is not None:
        raise ConfigError(
            WIDTHS_FLAG,
            list(widths),
            f"no effect with a fixed width; give {WIDTH_FLAG} adaptive",
        )
    return FixedWidth(block_size)


def _checked(widths: Sequence[int] | None, block_size: int) -> Sequence[int]:
    if widths is None:
        return (*(width for width in DEFAULT_WIDTHS if width < block_size), block_size)
    if widths[0] != 1 or widths[-1] != block_size or list(widths) != sorted(set(widths)):
        raise ConfigError(
            WIDTHS_FLAG,
            list(widths),
            "give ascending numbers from 1 (plain decoding) to the block size, " + str(block_size),
        )
    return widths


def _device(settings: Any) -> str:
    return settings.device or "cpu"


def _excluded(settings: Any) -> str | None:
    """Why the width cannot be adaptive with these settings, and what to give instead; or None."""
    device = _device(settings)
    if settings.enable_deterministic_inference:
        return (
            "depends on how long steps take, and --enable-deterministic-inference is given; give "
            "fixed"
        )
    if device not in ("cpu", "cuda"):
        return f"is served on CPUs and CUDA, not on {device!r}; give fixed"
    if device == "cuda" and _verifies_with_flashinfer(settings):
        return (
            "verifies single tokens, and FlashInfer's kernel for recurrent layers is for more than "
            "one; give --linear-attn-verify-backend triton"
        )
    if device == "cuda" and settings.enable_lora:
        return (
            "has CUDA graphs of several widths, and SGLang keeps the buffers of LoRA for one; give "
            "fixed, or leave out --enable-lora"
        )
    return None


def _verifies_with_flashinfer(settings: Any) -> bool:
    """Whether recurrent layers would, by SGLang's rule (layers/attention/linear/utils.py)."""
    decode = settings.linear_attn_decode_backend or settings.linear_attn_backend
    return (settings.linear_attn_verify_backend or decode) == "flashinfer"
