"""What `sglang-dflash bench` was asked for: every knob, its default and its check. Standard library only: `--help` reads it."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from sglang_dflash.checkpoint.errors import ConfigError


class Scale(NamedTuple):
    """How much is measured where nothing else is said. `max_new_tokens`: per answer, at most; `rounds`: passes per arm and concurrency."""

    concurrency: str
    num_prompts: int
    max_new_tokens: int
    rounds: int


# On two cores, the three arms of the embedded dense pair in under ten minutes.
ON_CPU = Scale("1,8,16", 16, 48, 2)
ON_ACCELERATOR = Scale("1,8,16,32", 128, 1024, 1)

KINDS = ("ar", "dflash", "builtin", "ngram")
# Those that draft blocks: the block size is the user's to choose, and the acceptance can be simulated.
BLOCK_KINDS = ("dflash", "builtin")
DTYPES = ("float32", "bfloat16", "float16")
OUT = "bench-results"


@dataclass(frozen=True)
class Settings:
    """One comparison. A field that is None, or empty where a default is named in `--help`, is filled in by `resolve`."""

    arm: tuple[str, ...] = ()
    base_url: tuple[str, ...] = ()
    model: str | None = None
    target: str | None = None
    draft: str | None = None
    dataset: tuple[str, ...] = ()
    dataset_file: str | None = None
    cache_dir: str | None = None
    concurrency: str | None = None
    block_size: tuple[int, ...] = ()
    num_prompts: int | None = None
    max_new_tokens: int | None = None
    rounds: int | None = None
    thinking: str | None = None
    ignore_eos: bool | None = None
    simulated_acceptance: float | None = None
    dtype: str | None = None
    in_turn: bool | None = None
    out: str = OUT
    server_flags: tuple[str, ...] = ()
    command: str = ""

    @classmethod
    def of(cls, given: dict[str, Any]) -> Settings:
        """From the command line's values; lists become tuples, what is not ours is left out. Raises ConfigError."""
        names = {f.name for f in fields(cls)}
        taken: dict[str, Any] = {
            k: tuple(v) if isinstance(v, list) else v
            for k, v in given.items()
            if k in names and v is not None
        }
        return cls(**taken)

    def __post_init__(self) -> None:
        for flag, value in (
            ("--num-prompts", self.num_prompts),
            ("--max-new-tokens", self.max_new_tokens),
            ("--rounds", self.rounds),
        ):
            if value is not None and value < 1:
                raise ConfigError(f"{flag}: {value}; a positive number is required")
        for size in self.block_size:
            if size < 2:
                raise ConfigError(f"--block-size: {size}; a block has at least 2 tokens")
        if len(set(self.block_size)) != len(self.block_size):
            raise ConfigError(
                f"--block-size: {', '.join(map(str, self.block_size))}; every size once"
            )
        for kind in self.arm:
            if kind not in KINDS:
                raise ConfigError(f"--arm: {kind!r}; choose from {', '.join(KINDS)}")
        self._check_what_is_served()
        self._check_names()
        self._check_simulation()
        if self.concurrency is not None:
            counts(self.concurrency)

    def _check_what_is_served(self) -> None:
        if (self.target is None) != (self.draft is None) and not self.base_url:
            raise ConfigError(
                "--target and --draft: one without the other; give both, or neither for an embedded pair"
            )
        if self.model is not None and self.target is not None:
            raise ConfigError(
                f"--model: {self.model!r} is an embedded pair, and --target names another; give one of the two"
            )
        if not self.base_url:
            return
        launching: tuple[tuple[str, Any], ...] = (
            ("--arm", self.arm),
            ("--block-size", self.block_size),
            ("--simulated-acceptance", self.simulated_acceptance),
            ("flags after --", self.server_flags),
        )
        for flag, value in launching:
            if value:
                raise ConfigError(
                    f"{flag}: {value} is for servers that are started here; with --base-url none is"
                )
        for one in self.base_url:
            name, _, url = one.partition("=")
            if not name or not url.startswith(("http://", "https://")):
                raise ConfigError(
                    f"--base-url: {one!r}; NAME=URL is required, as in vllm=http://localhost:8000"
                )

    def _check_names(self) -> None:
        names = [one.partition("=")[0] for one in self.base_url] or list(self.arm)
        if len(set(names)) != len(names):
            raise ConfigError(
                f"--{'base-url' if self.base_url else 'arm'}: {', '.join(names)}; every name once"
            )
        if self.dataset and self.dataset_file is not None:
            raise ConfigError(
                f"--dataset-file: {self.dataset_file!r} stands instead of --dataset; give one of the two"
            )

    def _check_simulation(self) -> None:
        length = self.simulated_acceptance
        if length is None:
            return
        if not 1 <= length < math.inf:
            raise ConfigError(
                f"--simulated-acceptance: {length:g}; a verify step commits 1 token or more"
            )
        self.check_block(min(self.block_size, default=None))
        if "ngram" in self.arm:
            raise ConfigError(
                "--arm: 'ngram' drafts trees, and SGLang simulates chains only; leave it out with --simulated-acceptance"
            )
        if self.arm and not set(self.arm) & set(BLOCK_KINDS):
            raise ConfigError(
                f"--simulated-acceptance: {length:g}, but none of {', '.join(self.arm)} drafts; add --arm dflash or builtin"
            )
        if self.ignore_eos is False:
            raise ConfigError(
                "--no-ignore-eos: with --simulated-acceptance an end means nothing, and all arms say as much; leave it out"
            )

    def check_block(self, size: int | None) -> None:
        """Raise ConfigError where more tokens are to be committed than a block has."""
        length = self.simulated_acceptance
        if length is not None and size is not None and length > size:
            raise ConfigError(
                f"--simulated-acceptance: {length:g}; a verify step of block size {size} commits at most {size} tokens"
            )

    @property
    def servers_at_once(self) -> int:
        """Servers of a resolved comparison that share the machine's memory."""
        return (
            1
            if self.in_turn
            else sum(
                max(1, len(self.block_size)) if kind in BLOCK_KINDS else 1 for kind in self.arm
            )
        )

    @property
    def random_weights(self) -> bool:
        """Whether the servers read no weights: a given pair need not have any where the acceptance is simulated."""
        chosen = any(flag.partition("=")[0] == "--load-format" for flag in self.server_flags)
        return self.simulated_acceptance is not None and self.target is not None and not chosen

    def resolve(self, accelerator: bool) -> Settings:
        """Fill in what depends on the machine: small on a CPU, of the published size elsewhere."""
        scale = ON_ACCELERATOR if accelerator else ON_CPU
        embedded = self.target is None and not self.base_url
        model = self.model or ("dense" if embedded else None)
        # bfloat16 is what large models are served in; the embedded pairs are here to be exact.
        usual = "bfloat16" if accelerator and not embedded else "float32"
        return replace(
            self,
            arm=() if self.base_url else self.arm or ("ar", "dflash"),
            model=model,
            dataset=self.dataset
            or (() if self.dataset_file else ("demo", "stdlib") if model else ("stdlib",)),
            concurrency=self.concurrency or scale.concurrency,
            num_prompts=self.num_prompts or scale.num_prompts,
            max_new_tokens=self.max_new_tokens or scale.max_new_tokens,
            rounds=self.rounds or scale.rounds,
            # Where random text ends means nothing: every arm is to say as much.
            ignore_eos=True if self.simulated_acceptance is not None else self.ignore_eos,
            dtype=self.dtype or usual,
            # Two servers of one large model do not fit one accelerator.
            in_turn=bool(accelerator and not embedded and not self.base_url)
            if self.in_turn is None
            else self.in_turn,
        )

    @property
    def levels(self) -> list[int]:
        """Concurrency levels of a resolved comparison, in the order given."""
        assert self.concurrency is not None
        return counts(self.concurrency)


def counts(text: str) -> list[int]:
    """'1,8' to [1, 8]. Raises ConfigError unless all are positive and different."""
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 1 or len(set(found)) != len(found):
        raise ConfigError(
            f"--concurrency: {text!r}; positive numbers of clients are required, each once, as in 1,8,16,32"
        )
    return found


def default_cache() -> Path:
    """Where fetched data sets are kept."""
    import os

    return (
        Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        / "sglang-dflash"
        / "datasets"
    )
