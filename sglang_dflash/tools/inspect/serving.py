"""The settings under which a pair would be served, by the flags of `sglang-dflash inspect`. No
torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from sglang_dflash.checkpoint.precision import asks_fp8_kv
from sglang_dflash.common.command_line import setting
from sglang_dflash.common.errors import ConfigError
from sglang_dflash.drafting.attention.capabilities import CAPABILITIES
from sglang_dflash.memory.sizes import KV_DTYPES
from sglang_dflash.serving.start.server_flags import human_readable_int

# Far above any device, and below what makes the arithmetic overflow.
_MOST_GIB, _MOST_REQUESTS, _MOST_TOKENS = 2**40, 2**20, 2**31 - 1
_WIDTHS = ("adaptive", "fixed")


def _kv_dtype(text: str) -> str:
    """A dtype of K/V, also as servers spell it."""
    return {"bf16": "bfloat16"}.get(text, text)


@dataclass(frozen=True)
class Serving:
    """The settings under which the pair would be served. A GiB is 2**30 bytes.

    Raises:
        ConfigError: a value is out of range.
    """

    max_running_requests: int = setting(48, "requests that decode at a time (default: {default})")
    context: int | None = setting(
        None,
        "how many requests of so many tokens, the answer included, run at a time; 64Ki is 65,536, "
        "and 64k is 64,000, as in SGLang's flags",
        metavar="N",
        type=human_readable_int,
    )
    context_length: int | None = setting(
        None,
        "tokens of a request that the server takes, at most; more than the target's if it is "
        "extended, as by YaRN (default: the target's)",
        type=human_readable_int,
    )
    tp_size: int = setting(1, "GPUs that the pair is split over (default: {default})")
    memory_gib: float = setting(
        80.0, "memory of each GPU, GiB (default: {default}; a card of 80 GB has about 79)"
    )
    mem_fraction: float = setting(0.9, "fraction of it for weights and KV (default: {default})")
    kv_memory_gib: float | None = setting(
        None, "memory for both KV pools, GiB (default: what weights and recurrent states leave)"
    )
    quantization: str | None = setting(
        None, "quantize the target's linear layers when they are loaded", choices=["fp8"]
    )
    max_mamba_cache_size: int | None = setting(
        None, "recurrent states (default: what running requests and cached sessions need)"
    )
    kv_dtype: str | None = setting(
        None,
        "target KV (default: bfloat16, or fp8_e4m3 if its config asks for it)",
        choices=list(KV_DTYPES),
        type=_kv_dtype,
    )
    draft_kv_dtype: str | None = setting(
        None, "draft KV (default: --kv-dtype)", choices=list(KV_DTYPES), type=_kv_dtype
    )
    width: str = setting(
        "fixed",
        "how many tokens of a block the target verifies, as --speculative-dflash-width of a server "
        "(default: {default})",
        choices=_WIDTHS,
    )
    attention: str | None = setting(
        None, f"draft attention, one of {', '.join(CAPABILITIES)} (default: the first that can)"
    )
    target_attention: str = setting(
        "fa3",
        "the target's, as SGLang names it, whose tables an adaptive width takes for each width "
        "(default: {default}, SGLang's on an H100)",
    )

    @property
    def dtype_of_draft_kv(self) -> str:
        """SGLang gives a draft on FA4 the models' dtype."""
        if self.attention == "fa4":
            return "bfloat16"
        return self.draft_kv_dtype or self.kv_dtype or "bfloat16"

    def for_target(self, config: Mapping[str, Any]) -> Self:
        """These settings, with K/V in FP8 if none is given and the target's config.json asks for
        it. Draft K/V stays in 16 bits then."""
        if self.kv_dtype is not None or not asks_fp8_kv(config):
            return self
        draft_kv = self.draft_kv_dtype or "bfloat16"
        return replace(self, kv_dtype="fp8_e4m3", draft_kv_dtype=draft_kv)

    def __post_init__(self) -> None:
        gib = f"a number of GiB above 0 and up to {_MOST_GIB} is required"
        tokens, of_tokens = "a positive number of tokens is required", ("context", "context_length")
        states = "a positive number of states is required"
        dtypes = f"choose one of {', '.join(KV_DTYPES)}"
        checks = (
            (
                "max_running_requests",
                lambda n: 1 <= n <= _MOST_REQUESTS,
                f"a number from 1 to {_MOST_REQUESTS} is required",
            ),
            (
                "tp_size",
                lambda n: 1 <= n <= _MOST_REQUESTS,
                "a positive number of GPUs is required",
            ),
            *((name, lambda n: n is None or 1 <= n <= _MOST_TOKENS, tokens) for name in of_tokens),
            ("max_mamba_cache_size", lambda n: n is None or 1 <= n <= _MOST_TOKENS, states),
            ("quantization", lambda name: name in (None, "fp8"), "choose fp8"),
            ("mem_fraction", lambda x: 0 < x <= 1, "a fraction above 0 and up to 1 is required"),
            ("memory_gib", lambda x: 0 < x <= _MOST_GIB, gib),
            ("kv_memory_gib", lambda x: x is None or 0 < x <= _MOST_GIB, gib),
            ("kv_dtype", lambda name: name is None or name in KV_DTYPES, dtypes),
            ("draft_kv_dtype", lambda name: name is None or name in KV_DTYPES, dtypes),
            ("width", lambda name: name in _WIDTHS, f"choose one of {', '.join(_WIDTHS)}"),
        )
        for name, is_valid, required in checks:
            if not is_valid(getattr(self, name)):
                raise ConfigError(name, getattr(self, name), required)
