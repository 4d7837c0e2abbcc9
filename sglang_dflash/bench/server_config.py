"""`ServerConfig`, the value that names a server: flags, environment, module. Stdlib only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Self

from sglang_dflash.facts.embedded import DemoPair

LAUNCH_SERVER = "sglang.launch_server"

# True is a flag without a value; a tuple is a flag with several.
FlagValue = str | int | float | bool | tuple[str | int | float, ...]


@dataclass(frozen=True)
class ServerConfig:
    """One server to start. Two servers with equal configurations answer alike, so this is a key.

    Attributes:
        flags: flag -> value, in the order of the command line. True is a flag without a value.
        extra_args: arguments that follow the flags as they are; of a repeated flag SGLang takes
            the last.
        env: environment variables on top of ours.
        module: what `python -m` runs.
    """

    flags: Mapping[str, FlagValue] = field(default_factory=dict)
    extra_args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    module: str = LAUNCH_SERVER

    def __post_init__(self) -> None:
        for name, value in self.flags.items():
            if not name.startswith("--"):
                raise ValueError(f"server flag {name!r}: a flag starts with --")
            if value is False:
                raise ValueError(f"server flag {name}: False; leave the flag out")
        object.__setattr__(self, "flags", MappingProxyType(dict(self.flags)))
        object.__setattr__(self, "env", MappingProxyType(dict(self.env)))

    def __hash__(self) -> int:
        parts = frozenset(self.flags.items()), frozenset(self.env.items())
        return hash((*parts, self.extra_args, self.module))

    def args(self) -> list[str]:
        """The command line after `python -m MODULE`."""
        rendered: list[str] = []
        for name, value in self.flags.items():
            rendered.append(name)
            if value is not True:
                values = value if isinstance(value, tuple) else (value,)
                rendered += map(str, values)
        return [*rendered, *self.extra_args]

    def with_flags(self, flags: Mapping[str, FlagValue]) -> Self:
        """The same server with these flags set; a flag that was set keeps its place."""
        return replace(self, flags={**self.flags, **flags})

    def without_flags(self, *names: str) -> Self:
        """The same server without these flags. Raises KeyError if one of them is not set."""
        flags = dict(self.flags)
        for name in names:
            del flags[name]
        return replace(self, flags=flags)


def dflash_flags(draft: str) -> dict[str, FlagValue]:
    """Flags that make a server draft whole blocks with the checkpoint `draft`, in every step."""
    return {
        "--speculative-algorithm": "DFLASH",
        "--speculative-draft-model-path": draft,
        "--speculative-dflash-width": "fixed",
    }


def demo_config(pair: DemoPair, *, dflash: bool) -> ServerConfig:
    """A server of an embedded pair: exact arithmetic, small pools, no busy waiting."""
    flags: dict[str, FlagValue] = {
        "--model-path": str(pair.target),
        "--dtype": "float32",
        "--max-total-tokens": 16384,
        "--sleep-on-idle": True,
    }
    if pair.is_hybrid:
        flags |= {"--max-mamba-cache-size": 96, "--max-running-requests": 16}
    return ServerConfig(flags | dflash_flags(str(pair.draft)) if dflash else flags)
