"""Settings that are refused with DFLASH, for a server and for `inspect`. No torch.

Settings are SGLang's, resolved, or `unserved.CommandLineSettings`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang_dflash.checkpoint.hub import checkpoint_id
from sglang_dflash.common.command_line import flag_of
from sglang_dflash.common.errors import ConfigError, shown

BLOCK_FLAG = "--speculative-num-draft-tokens"
# SGLang's own, of another field.
BLOCK_ALIAS = "--speculative-dflash-block-size"
WIDTH_FLAG = "--speculative-dflash-width"


# Switches with which no server has drafts, of whichever worker -> why.
REFUSED_SWITCHES: Mapping[str, str] = {
    "use_ray": "SGLang's Ray actors load no plugin, and so none of our checks",
    "enable_pdmux": (
        "SGLang then prefills past the speculative worker, and the first decode step would end the "
        "server"
    ),
}


def refuse_switches(settings: Any) -> None:
    """Raise ConfigError if one of `REFUSED_SWITCHES` is on."""
    for name, why in REFUSED_SWITCHES.items():
        if getattr(settings, name):
            raise ConfigError(flag_of(name), True, f"leave it out: {why}")


def refuse_splits(settings: Any) -> None:
    """Raise ConfigError for a split of the model that SGLang refuses with DFLASH (`_handle_dflash`
    in its speculative_hook.py), whichever worker would serve."""
    if settings.pp_size not in (None, 1):
        required = "SGLang refuses DFLASH with it; give --tp-size"
        raise ConfigError("--pp-size", settings.pp_size, required)
    replicas = settings.attn_dp_size
    if replicas not in (None, 1) and not settings.enable_dp_lm_head:
        required = "SGLang refuses DFLASH with it, unless --enable-dp-lm-head is given, too"
        raise ConfigError("data-parallel attention", replicas, required)


def refuse_trusted(settings: Any) -> None:
    """Raise ConfigError if --trust-remote-code is for the draft, too: if it is in the target's
    repository, or the tokenizer is the draft's."""
    if not settings.trust_remote_code:
        return
    draft = settings.speculative_draft_model_path
    if checkpoint_id(settings.model_path) == checkpoint_id(draft):
        required = "with --trust-remote-code, not the target's repository: give a folder of its own"
        raise ConfigError("draft", draft, required)
    tokenizer = settings.tokenizer_path
    if tokenizer is not None and checkpoint_id(tokenizer) == checkpoint_id(draft):
        required = "with --trust-remote-code, not the draft's: its code is never run"
        raise ConfigError("--tokenizer-path", tokenizer, required)


def asked_block(settings: Any) -> int | None:
    """The tokens that a step verifies, at most, by SGLang's two flags; None if neither is given.

    Raises:
        ConfigError: they differ.
    """
    block, alias = settings.speculative_num_draft_tokens, settings.speculative_dflash_block_size
    if alias is not None and block not in (None, alias):
        raise ConfigError(
            BLOCK_ALIAS, alias, f"but {BLOCK_FLAG} is {shown(block)}; give one of them"
        )
    return alias if block is None else block


def why_not_adaptive(settings: Any, device: str) -> str | None:
    """Return why the width cannot be adaptive with these settings, and what to give instead; None
    if it can."""
    if settings.enable_deterministic_inference:
        return (
            "depends on measured step times, which --enable-deterministic-inference excludes; give "
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
    """Return whether recurrent layers verify with FlashInfer, by SGLang's rule
    (layers/attention/linear/utils.py)."""
    decode = settings.linear_attn_decode_backend or settings.linear_attn_backend
    return (settings.linear_attn_verify_backend or decode) == "flashinfer"
