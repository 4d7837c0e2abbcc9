"""The settings of a server with which SGLang's own DFLASH worker serves in place of ours, and those
that have no effect on ours.

Two tables: the choice of the worker, log lines, /server_info, `doctor` and `inspect` read them, and
`launch/docs_tables.py` writes them into docs/limits.md. Settings are by SGLang's field names. No
SGLang here.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from sglang_dflash.common.command_line import flag_of

# Asks for SGLang's own worker.
BUILTIN_FLAG = "--speculative-dflash-worker builtin"
# SGLang 0.5.23's names of draft attention backends that have no counterpart here.
_THEIR_ATTENTION = ("flashinfer", "ascend", "trtllm_mha", "intel_xpu")


class Unserved(NamedTuple):
    """One setting.

    Attributes:
        setting: as messages name it; a field in braces stands for its value.
        is_given: called with the settings, and --speculative-draft-attention-backend as it was
            given: SGLang resolves one that was not to the target's.
        why: why our worker cannot serve it.
        instead: what to do to have ours, in Markdown.
        in_docs: the setting in Markdown, for readers who have not given a value; `setting` with its
            flags marked if it is empty.
    """

    setting: str
    is_given: Callable[[Any, str | None], bool]
    why: str
    instead: str
    in_docs: str = ""


def _has(field: str) -> Callable[[Any, str | None], bool]:
    return lambda settings, _: bool(getattr(settings, field))


def _above_1(field: str) -> Callable[[Any, str | None], bool]:
    return lambda settings, _: (getattr(settings, field) or 1) > 1


def _is_set(variable: str) -> Callable[[Any, str | None], bool]:
    return lambda *_: os.environ.get(variable, "").lower() in ("1", "true", "yes", "y")


def _is_disaggregated(settings: Any) -> bool:
    return settings.disaggregation_mode not in (None, "null")


def _has_4bit_draft_kv(settings: Any, attention: str | None) -> bool:
    """A draft on FA4 has the model's dtype (`gpu.backends.draft_kv_dtype`)."""
    return (
        settings.kv_cache_dtype in ("nvfp4", "fp4_mx_block16")
        and settings.speculative_draft_kv_cache_dtype is None
        and attention != "fa4"
    )


def _has_quantized_draft(settings: Any, _: str | None) -> bool:
    """Return whether the draft's quantization was asked for. If not, SGLang notes the target's as
    the draft's."""
    explicit = settings._speculative_draft_quantization_explicitly_set
    return bool(explicit and settings.speculative_draft_model_quantization)


UNSERVED = (
    Unserved(
        "data-parallel attention (--enable-dp-attention)", _above_1("attn_dp_size"),
        "ranks without requests would have to take part in every draft",
        "`--dp-size` without it: replicas, each with a drafter of its own",
    ),
    Unserved(
        "--device {device}", lambda s, _: s.device not in (None, "cpu", "cuda"),
        "our drafter has not been tried there",
        "a CPU or a CUDA GPU (ROCm is served like one, and untested)",
        in_docs="`--device` of another kind (NPU, XPU)",
    ),
    # With --dcp-size, SGLang's pool has more slots than a rank has memory for.
    *(
        Unserved(
            f"{flag_of(field)} above 1", _above_1(field),
            "the drafter is split over tensor-parallel ranks by heads, not by tokens",
            "`--tp-size` alone",
        )
        for field in ("attn_cp_size", "dcp_size")
    ),
    Unserved(
        "--pp-size above 1", _above_1("pp_size"),
        "the hidden states that a draft needs are spread over stages; SGLang refuses it, with its "
        "own worker, too",
        "`--tp-size`",
    ),
    Unserved(
        "SGLANG_ENABLE_PP_SPEC", _is_set("SGLANG_ENABLE_PP_SPEC"),
        "it moves what verify forwards save of recurrent layers to rows that replay does not read",
        "leave it unset",
        in_docs="`SGLANG_ENABLE_PP_SPEC=1`",
    ),
    Unserved(
        "--disaggregation-mode decode with --enable-hierarchical-cache",
        lambda s, _: s.disaggregation_mode == "decode" and bool(s.enable_hierarchical_cache),
        "SGLang then restores prefixes in ways of its own",
        "on the prefill server only",
        in_docs="`--disaggregation-mode decode` with `--enable-hierarchical-cache`",
    ),
    Unserved(
        "--disaggregation-transfer-backend other than mooncake and nixl",
        lambda s, _: _is_disaggregated(s)
        and s.disaggregation_transfer_backend not in (None, "mooncake", "nixl"),
        "they send fewer kinds of state",
        "`mooncake`",
        in_docs="`--disaggregation-transfer-backend` other than `mooncake` and `nixl` "
        "(`nixl` has not been run)",
    ),
    Unserved(
        "--disaggregation-enable-kv-checksum",
        lambda s, _: _is_disaggregated(s) and bool(s.disaggregation_enable_kv_checksum),
        "SGLang checks one kind of pages per state, which are not the draft's",
        "leave it out",
    ),
    Unserved(
        "--disaggregation-decode-host-receive-threshold below 1",
        lambda s, _: _is_disaggregated(s)
        and s.disaggregation_decode_host_receive_threshold is not None
        and s.disaggregation_decode_host_receive_threshold < 1,
        "SGLang receives the target's K/V only in host memory",
        "leave it out",
    ),
    *(
        Unserved(
            flag_of(field), _has(field),
            "it puts K/V into slots without telling our worker; drafts would read what was there",
            "`--enable-hierarchical-cache`",
        )
        for field in (
            "enable_flexkv", "enable_lmcache", "enable_unified_cache_external_linker",
            "radix_cache_backend",
        )
    ),
    Unserved(
        "--enable-pd-role-switch", _has("enable_pd_role_switch"),
        "a prefill server is built without what a step needs",
        "fixed roles",
    ),
    Unserved(
        "--enable-two-batch-overlap", _has("enable_two_batch_overlap"),
        "a batch's two halves would take turns in the drafter too",
        "leave it out",
    ),
    Unserved(
        "--hicache-host-memory-mode buffer_only",
        lambda s, _: bool(s.enable_hierarchical_cache)
        and s.hicache_host_memory_mode == "buffer_only",
        "host memory then holds no prefixes for us to follow",
        "`cache`, the default",
        in_docs="`--hicache-host-memory-mode buffer_only`",
    ),
    Unserved(
        "--enable-memory-saver", _has("enable_memory_saver"),
        "draft weights and draft K/V would stay on the device when memory is released",
        "leave it out",
    ),
    Unserved(
        "--enable-unified-memory", _has("enable_unified_memory"),
        "SGLang lays a draft's KV into the target's pages; ours is a cache of its own",
        "leave it out",
    ),
    Unserved(
        "--speculative-use-block-verification", _has("speculative_use_block_verification"),
        "another accept rule, for drafts that give probabilities",
        "leave it out",
    ),
    Unserved(
        "--speculative-draft-model-quantization", _has_quantized_draft,
        "the drafter's weights have 16 or 32 bits",
        "leave it out: the draft's own `quantization_config` is followed",
    ),
    Unserved(
        "a 4-bit --kv-cache-dtype without --speculative-draft-kv-cache-dtype", _has_4bit_draft_kv,
        "draft K/V would take the dtype over, which packs two numbers into a byte",
        "`--speculative-draft-kv-cache-dtype bf16`, or a draft on FA4",
        in_docs="`--kv-cache-dtype nvfp4` or `fp4_mx_block16`, without "
        "`--speculative-draft-kv-cache-dtype`",
    ),
    Unserved(
        "--speculative-draft-attention-backend {speculative_draft_attention_backend}",
        lambda _, attention: attention in _THEIR_ATTENTION,
        "ours has no counterpart",
        "leave the flag out",
        in_docs="`--speculative-draft-attention-backend` with another backend of SGLang's "
        f"({', '.join(f'`{name}`' for name in _THEIR_ATTENTION)})",
    ),
)  # fmt: skip


def builtin_reason(settings: Any, attention: str | None) -> str | None:
    """Return the first setting that only SGLang's own worker serves; None without one.

    Args:
        settings: SGLang's, resolved, or `CommandLineSettings`.
        attention: see `Unserved.is_given`.
    """
    for row in UNSERVED:
        if row.is_given(settings, attention):
            values = {"device": settings.device, "speculative_draft_attention_backend": attention}
            return row.setting.format_map(values)
    return None


class Ignored(NamedTuple):
    """Flags that SGLang takes with DFLASH, and our worker does not read.

    Attributes:
        flags: their names; one that ends in a hyphen stands for all that begin so.
        why: why they have no effect.
        followed: values that do have one.
        in_docs: what the docs add to the flags, in Markdown.
        note: what the docs add to `why`.
    """

    flags: tuple[str, ...]
    why: str
    followed: tuple[str, ...] = ()
    in_docs: str = ""
    note: str = ""

    def has(self, flag: str) -> bool:
        beginnings = tuple(name for name in self.flags if name.endswith("-"))
        return flag in self.flags or flag.startswith(beginnings)


IGNORED = (
    Ignored(
        ("--speculative-accept-threshold-single", "--speculative-accept-threshold-acc"),
        "drafts are accepted so that sampled answers have "
        "plain decoding's distribution",
        in_docs="below 1, and both in `/set_internal_state`",
        note="SGLang's worker accepts more with them, on CUDA",
    ),
    Ignored(
        ("--speculative-use-rejection-sampling",),
        "SGLang reads it for EAGLE only, with its own DFLASH worker, too",
    ),
    Ignored(
        ("--speculative-draft-load-format",),
        "drafts are read from safetensors files",
        followed=("auto", "safetensors", "dummy"),
    ),
    Ignored(
        (
            "--speculative-moe-runner-backend", "--speculative-moe-a2a-backend",
            "--speculative-enable-w4a4-mxfp4-megamoe",
        ),
        "drafts have no experts",
    ),
    Ignored(
        (
            "--speculative-token-map", "--speculative-adaptive-config",
            "--speculative-domino-candidate-pool-size", "--speculative-dspark-",
            "--speculative-ngram-",
        ),
        "for drafts of other kinds",
    ),
)  # fmt: skip


class CommandLineSettings:
    """The settings of a launch command: any that it does not give is None.

    Args:
        settings: see `server_flags.settings_of`.
    """

    # A quantization on the command line was asked for.
    _speculative_draft_quantization_explicitly_set = True

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.__dict__.update(settings)
        if settings.get("enable_dp_attention"):
            self.attn_dp_size = settings.get("dp_size")

    def __getattr__(self, name: str) -> None:
        return None
