"""What a server's launch command means for `sglang-dflash inspect`, by the names of its flags.
SGLang is not imported."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from sglang_dflash.facts.command_line import spelled
from sglang_dflash.facts.errors import ConfigError
from sglang_dflash.facts.launch import DRAFT, TARGET, flags_of
from sglang_dflash.facts.unserved import Given, builtin_reason
from sglang_dflash.inspect.serving import Serving

# SGLang's flag, or ours of a server -> the flag of `sglang-dflash inspect`.
_FLAGS: Mapping[str, str] = {
    "--max-running-requests": "--max-running-requests",
    "--tp-size": "--tp-size",
    "--tensor-parallel-size": "--tp-size",
    "--tp": "--tp-size",
    "--mem-fraction-static": "--mem-fraction",
    "--context-length": "--context-length",
    "--kv-cache-dtype": "--kv-dtype",
    "--speculative-draft-kv-cache-dtype": "--draft-kv-dtype",
    "--speculative-draft-window-size": "--window",
    "--speculative-dflash-draft-window-size": "--window",
    "--speculative-draft-sink-size": "--sinks",
    "--speculative-num-draft-tokens": "--block-size",
    "--speculative-dflash-block-size": "--block-size",
    "--speculative-dflash-draft-kv-tokens": "--draft-kv-tokens",
    "--speculative-dflash-width": "--width",
    "--speculative-draft-attention-backend": "--draft-attention-backend",
    "--attention-backend": "--attention-backend",
    "--max-mamba-cache-size": "--max-mamba-cache-size",
    "--quantization": "--quantization",
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
# A value of a server -> that of `inspect`.
_VALUES = {"bf16": "bfloat16", "torch_native": "torch"}
# They change the figures, and are not part of the arithmetic.
_NOT_RECKONED = {
    "--config", "--max-total-tokens", "--mamba-full-memory-ratio", "--mamba-ssm-dtype",
    "--disable-radix-cache", "--swa-full-tokens-ratio", "--dtype", "--dp-size",
    "--data-parallel-size", "--dp", "--ep-size", "--expert-parallel-size", "--ep",
    "--cpu-offload-gb", "--enable-lora", "--lora-paths", "--page-size",
    "--speculative-dflash-recurrent-rollback", "--speculative-dflash-extension",
    "--disaggregation-mode", "--enable-hierarchical-cache", "--disable-cuda-graph",
    "--cuda-graph-bs-decode", "--cuda-graph-max-bs-decode", "--speculative-dflash-draft-graphs",
    "--prefill-attention-backend", "--decode-attention-backend",
}  # fmt: skip


class Launch(NamedTuple):
    """A launch command as `inspect` reads it.

    Attributes:
        words: the arguments of `inspect` that it comes to.
        builtin: the setting with which SGLang's worker serves; None without one.
        not_reckoned: flags, with their values, that the figures leave out.
    """

    words: list[str]
    builtin: str | None
    not_reckoned: list[str]


def is_launch(words: Sequence[str]) -> bool:
    """Whether the target is given as a server takes it."""
    return any(word.partition("=")[0] in TARGET for word in words)


def read(words: Sequence[str], own: Collection[str] = ()) -> Launch:
    """Of a command, with or without the program in front of its flags.

    Args:
        own: flags of `inspect`, which stay as they are.

    Raises:
        ConfigError: it names no target, or is not for DFLASH.
    """
    given = {flag: " ".join(values) for flag, values in flags_of(words)}
    found, taken = Launch([], _builtin(given), []), dict[str, str]()
    pair: dict[str, str] = {}
    for flag, value in given.items():
        typed = f"{flag} {value}".rstrip()
        if flag in TARGET or flag in DRAFT:
            pair["target" if flag in TARGET else "draft"] = value
        elif flag == "--speculative-algorithm":
            if value.upper() != "DFLASH":
                raise ConfigError(flag, value, "inspect is about DFLASH")
        elif flag == "--speculative-dflash-lookup":
            found.words.extend(["--lookup"] if value == "on" else [])
        elif flag == "--quantization" and value != "fp8":
            found.not_reckoned.append(typed)
        elif flag in _FLAGS:
            value = _VALUES.get(value, value)
            if value != "auto":
                taken[_FLAGS[flag]] = value
        elif flag in _NOT_RECKONED:
            found.not_reckoned.append(typed)
        elif flag in own:
            found.words.extend([flag, value] if value else [flag])
    if "target" not in pair:
        raise ConfigError("server_flags", required=f"missing; {TARGET[0]} names the target")
    figures = [word for both in taken.items() for word in both]
    positional = [pair["target"], *([pair["draft"]] if "draft" in pair else [])]
    return found._replace(words=[*positional, *figures, *found.words])


def server_flags(settings: Mapping[str, Any]) -> list[str]:
    """The flags of a server for fields of `Options` and `Serving`. Those that only say what the
    machine is have none."""
    spelling = {ours: server for server, ours in reversed(list(_FLAGS.items()))}
    words = list[str]()
    for name, value in settings.items():
        flag = spelling.get({**OPTION_FLAGS, **SERVING_FLAGS}.get(name, ""))
        if name == "looks_up":
            words += ["--speculative-dflash-lookup", "on"]
        elif flag is not None:
            words += [flag, f"{value:g}" if isinstance(value, float) else str(value)]
    return words


def _builtin(given: Mapping[str, str]) -> str | None:
    """The setting with which SGLang's own worker serves; None without one."""
    if given.get("--speculative-dflash-worker") == "builtin":
        return "--speculative-dflash-worker builtin"
    return builtin_reason(Given(given), given.get("--speculative-draft-attention-backend"))
