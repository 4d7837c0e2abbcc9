"""A server's launch command as `sglang-dflash inspect` takes it. SGLang is not imported."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from sglang_dflash.checkpoint.origin import published_draft
from sglang_dflash.common.command_line import flag_of, spelled
from sglang_dflash.common.errors import ConfigError
from sglang_dflash.memory.sizes import KV_DTYPES
from sglang_dflash.serving.start import flag_file
from sglang_dflash.serving.start.refused_settings import (
    WIDTH_FLAG,
    asked_block,
    refuse_splits,
    refuse_switches,
    refuse_trusted,
    why_not_adaptive,
)
from sglang_dflash.serving.start.server_flags import COMMAND, TARGET_FLAGS, rows, settings_of
from sglang_dflash.serving.start.unserved import BUILTIN_FLAG, CommandLineSettings, builtin_reason
from sglang_dflash.tools.inspect.serving import Serving

# A setting of a server -> the flag of `sglang-dflash inspect`.
FLAGS: Mapping[str, str] = {
    "max_running_requests": "--max-running-requests",
    "tp_size": "--tp-size",
    "mem_fraction_static": "--mem-fraction",
    "context_length": "--context-length",
    "kv_cache_dtype": "--kv-dtype",
    "speculative_draft_kv_cache_dtype": "--draft-kv-dtype",
    "speculative_draft_window_size": "--window",
    "speculative_draft_sink_size": "--sinks",
    "speculative_num_draft_tokens": "--block-size",
    "speculative_dflash_block_size": "--block-size",
    "speculative_dflash_draft_kv_tokens": "--draft-kv-tokens",
    "speculative_dflash_width": "--width",
    "speculative_draft_attention_backend": "--draft-attention-backend",
    "attention_backend": "--attention-backend",
    "max_mamba_cache_size": "--max-mamba-cache-size",
    "quantization": "--quantization",
}
# The flags of `inspect`, by the fields of `Options` and `Serving`.
OPTION_FLAGS = spelled(
    ("window", "sinks", "draft_kv_tokens"), verify_block="--block-size", looks_up="--lookup"
)
SERVING_FLAGS = spelled(
    Serving.__dataclass_fields__,
    attention="--draft-attention-backend",
    target_attention="--attention-backend",
)


def spellings(flags: Mapping[str, str]) -> dict[str, str]:
    """Flags of `inspect` by field, each with a server's spellings behind its own."""
    servers = {
        flag: [flag_of(setting) for setting, ours in FLAGS.items() if ours == flag]
        for flag in flags.values()
    }
    return {field: " ".join(dict.fromkeys([flag, *servers[flag]])) for field, flag in flags.items()}


# A value of a server -> that of `inspect`.
_VALUES = {"torch_native": "torch"}
# They change the figures, and are not part of the arithmetic.
NOT_RECKONED = (
    "device", "dtype", "json_model_override_args", "load_format",
    # Files of the hub.
    "revision", "speculative_draft_model_revision",
    # Ranks.
    "dp_size", "attn_dp_size", "attn_cp_size", "ep_size", "moe_dp_size", "dcp_size",
    "moe_dense_tp_size", "enable_dp_lm_head",
    # Weights that are not there.
    "language_only", "language_model_only", "cpu_offload_gb", "offload_group_size",
    "ple_offload_embedding", "kt_num_gpu_experts", "enable_paged_experts",
    # Weights beside the target's.
    "enable_lora", "lora_paths",
    # The pools.
    "max_total_tokens", "page_size", "disable_radix_cache", "swa_full_tokens_ratio",
    "disable_hybrid_swa_memory", "swa_prefix_tails", "qsa_indexer_dtype", "dsa_prefill_backend",
    "dsa_decode_backend", "dsv4_attn_backend", "enable_deepseek_v4_fp4_indexer",
    "enable_page_major_kv_layout", "mm_feature_transport", "enable_hierarchical_cache",
    "enable_hisparse", "disaggregation_mode",
    # The pool of recurrent states.
    "mamba_full_memory_ratio", "mamba_ssm_dtype", "mamba_radix_cache_strategy",
    "disable_overlap_schedule", "enable_int8_mamba_checkpoint",
    "speculative_dflash_recurrent_rollback",
    # Steps.
    "prefill_attention_backend", "decode_attention_backend", "disable_cuda_graph",
    "disable_decode_cuda_graph", "cuda_graph_backend_decode", "cuda_graph_config",
    "cuda_graph_bs_decode", "cuda_graph_max_bs_decode", "disable_cuda_graph_padding",
    "speculative_dflash_draft_graphs", "speculative_dflash_extension",
)  # fmt: skip
# Settings of which the arithmetic has these values only.
_RECKONED: Mapping[str, tuple[Any, ...]] = {
    "device": ("cuda",),
    "dtype": ("auto", "bfloat16", "float16", "half"),
    "load_format": ("auto", "safetensors", "dummy"),
    "quantization": ("fp8",),
    "kv_cache_dtype": ("auto", "bf16", *KV_DTYPES),
    "mamba_radix_cache_strategy": ("auto", "extra_buffer"),
    "mm_feature_transport": ("cpu",),
    "disaggregation_mode": ("null",),
}
# Flags of our worker that the arithmetic reads.
_OURS = (
    "speculative_dflash_draft_kv_tokens", "speculative_dflash_width", "speculative_dflash_lookup",
)  # fmt: skip
# With them a command cannot be judged.
_NOT_JUDGED = {
    "help": "nothing is served with it",
    "config": "a server reads no file that is given so; write --config FILE, as two words",
}
_PAIR = ("model_path", "speculative_draft_model_path")
# What every command that is suggested says itself.
_SAID = (*_PAIR, "speculative_algorithm", "speculative_dflash_worker", "speculative_dflash_lookup")


class Launch(NamedTuple):
    """A launch command as `inspect` reads it.

    Attributes:
        words: the arguments of `inspect` that it comes to.
        builtin: the setting with which SGLang's worker serves; None without one.
        not_reckoned: flags, with their values, that the figures leave out.
        others: all flags that the arguments do not stand for, with their values, in words.
    """

    words: list[str]
    builtin: str | None
    not_reckoned: list[str]
    others: list[str]


def is_launch(words: Sequence[str]) -> bool:
    """Return whether the target is given as a server takes it."""
    flags = (*TARGET_FLAGS, flag_file.FLAG)
    return any(word.partition("=")[0] in flags for word in words)


def without_own(words: Sequence[str], flags: Collection[str]) -> tuple[list[str], list[str]]:
    """Divide words that are flags of `inspect` and of a server: those that only `inspect` has, with
    their values, and the rest. A flag of both is a server's.

    Args:
        flags: those of `inspect`.
    """
    of_servers = {flag for row in rows() for flag in row["flags"]}
    ours, theirs = list[str](), list[str]()
    for run in _runs(words):
        flag = run[0].partition("=")[0]
        (ours if flag in flags and flag not in of_servers else theirs).extend(run)
    return ours, theirs


def _runs(words: Sequence[str]) -> Iterator[list[str]]:
    """Each flag with its values, and what stands before the first."""
    run: list[str] = []
    for word in words:
        if run and re.match(r"-\D", word):
            yield run
            run = []
        run.append(word)
    if run:
        yield run


def read(command: Sequence[str]) -> Launch:
    """A command, with or without the program in front of its flags.

    Raises:
        ConfigError: a server would refuse its flags; it names no target, does not serve with
            DFLASH, or cannot be judged.
    """
    settings = settings_of(command)
    for name, reason in _NOT_JUDGED.items():
        if name in settings:
            raise ConfigError(COMMAND, required=f"{flag_of(name)}: {reason}")
    if "model_path" not in settings:
        raise ConfigError(COMMAND, required="missing; --model-path names the target")
    _check_algorithm(settings.get("speculative_algorithm"))
    if "speculative_draft_model_path" not in settings:
        settings["speculative_draft_model_path"] = published_draft(settings["model_path"])
    builtin = _builtin(settings)
    if builtin is not None:  # They have no effect.
        settings = {name: value for name, value in settings.items() if name not in _OURS}
    _check(CommandLineSettings(settings))
    words = [settings[name] for name in _PAIR]
    left_out, others = list[str](), list[str]()
    for name, value in settings.items():
        is_reckoned = _is_reckoned(name, value)
        if not is_reckoned:
            left_out.append(" ".join(_typed(name, value)))
        if is_reckoned and name in FLAGS:
            words += [FLAGS[name], str(_VALUES.get(value, value))] if value != "auto" else []
        elif name not in _SAID:
            others += _typed(name, value)
    if settings.get("speculative_dflash_lookup") == "on":
        words.append("--lookup")
    return Launch(words, builtin, left_out, others)


def _is_reckoned(name: str, value: Any) -> bool:
    """Return whether the figures are those of a server with that setting."""
    return value in _RECKONED[name] if name in _RECKONED else name not in NOT_RECKONED


def _check_algorithm(name: str | None) -> None:
    """Raise ConfigError unless it is DFLASH."""
    flag, algorithm = "--speculative-algorithm", "DFLASH"
    if name is None:
        required = f"missing; without {flag} {algorithm} a server decodes plainly"
        raise ConfigError(flag, required=required)
    if name.upper() != algorithm:
        near = difflib.get_close_matches(name.upper(), [algorithm])
        required = f"did you mean {algorithm}?" if near else f"inspect is about {algorithm}"
        raise ConfigError(flag, name, required)


def _check(settings: CommandLineSettings) -> None:
    """Raise ConfigError for what a server refuses, and the arithmetic does not read."""
    refuse_switches(settings)
    refuse_splits(settings)
    refuse_trusted(settings)
    asked_block(settings)
    why_not = why_not_adaptive(settings, settings.device or "cuda")
    if settings.speculative_dflash_width == "adaptive" and why_not is not None:
        raise ConfigError(WIDTH_FLAG, "adaptive", why_not)


def _typed(name: str, value: Any) -> list[str]:
    """A setting as a command line gives it, in words."""
    row = next(row for row in rows() if row["name"] == name)
    flag, *others = (word for word in row["flags"] if word.startswith("--"))
    if isinstance(value, bool):
        # Of a setting that is on or off, the other form switches it off.
        return [flag if value else others[0]]
    if row.get("type") == "loads":
        return [flag, json.dumps(value)]
    return [flag, *map(str, value if isinstance(value, list) else [value])]


def server_flags(settings: Mapping[str, Any]) -> list[str]:
    """The flags of a server for fields of `Options` and `Serving`. Those that only say what the
    machine is have none."""
    spelling = {ours: server for server, ours in reversed(list(FLAGS.items()))}
    words = list[str]()
    for name, value in settings.items():
        setting = spelling.get({**OPTION_FLAGS, **SERVING_FLAGS}.get(name, ""))
        if name == "looks_up":
            words += ["--speculative-dflash-lookup", "on"]
        elif setting is not None:
            words += [flag_of(setting), f"{value:g}" if isinstance(value, float) else str(value)]
    return words


def _builtin(settings: Mapping[str, Any]) -> str | None:
    """The setting with which SGLang's own worker serves; None without one."""
    if settings.get("speculative_dflash_worker") == "builtin":
        return BUILTIN_FLAG
    attention = settings.get("speculative_draft_attention_backend")
    return builtin_reason(CommandLineSettings(settings), attention)
