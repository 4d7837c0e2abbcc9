"""What `sglang-dflash bench` was asked for (`Settings`) and what is measured (`ResolvedSettings`).

Loads without torch and `requests`: `--help` reads it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

from sglang_dflash.bench.datasets import check_name, default_cache
from sglang_dflash.facts.errors import ConfigError


class Scale(NamedTuple):
    """How much is measured by default.

    `max_new_tokens`: per answer, at most; `rounds`: passes per arm and concurrency.
    """

    concurrency: str
    num_prompts: int
    max_new_tokens: int
    rounds: int


# On two cores, the three arms of the embedded dense pair in under ten minutes. Fewer than three
# rounds show no spread (`report.LEAST_ROUNDS`).
ON_CPU = Scale("1,8,16", 16, 48, 3)
ON_ACCELERATOR = Scale("1,8,16,32", 128, 1024, 3)

# Those that draft blocks: their block size can be chosen, and their acceptance simulated.
BLOCK_KINDS = (
    "dflash",
    "dflash-adaptive",
    "dflash-no-overlap",
    "builtin",
    "builtin-no-overlap",
)
KINDS = ("ar", "ar-no-overlap", *BLOCK_KINDS, "ngram")
DTYPES = ("float32", "bfloat16", "float16")
OUT = "bench-results"
# For embedded pairs whose own prompts are no memorized text.
_DEFAULT_SETS = {"code": ("unseen",)}


class EmbeddedPair(NamedTuple):
    """An embedded pair, by its kind."""

    kind: str


class GivenPair(NamedTuple):
    """Checkpoints to serve: folders or hub names."""

    target: str
    draft: str


class RunningServers(NamedTuple):
    """Servers that run already: (name, URL) each.

    `model`: the embedded pair that they serve, if any; `target`: otherwise, whose tokenizer they
    use, if known.
    """

    servers: tuple[tuple[str, str], ...]
    model: str | None
    target: str | None


@dataclass(frozen=True)
class ResolvedSettings:
    """One comparison on one machine, all decided.

    Attributes:
        served: what the arms decode with.
        arm: kinds of decoding, in the order asked for; empty for running servers.
        dataset: names of data sets; empty if there is a `dataset_file`.
        levels: concurrency levels, in the order asked for.
        block_size: block sizes to compare; empty for the draft's own.
        max_new_tokens: per answer, at most.
        rounds: passes per arm and concurrency.
        thinking: "on" or "off" for the chat template; None to leave it to the template.
        ignore_eos: None to end chats where the model ends them, and plain texts not at all.
        simulated_acceptance: tokens that every verify step commits; None for real acceptance.
        request_rate: requests sent per second, at random times; None to send as soon as a client
            is free.
        seed: of the choice of prompts and of the times at which requests are sent.
        in_turn: one server after another, instead of all at once.
        port: of the first server that is started, the next ones for the others; None for any.
        output_file: gets the report as one more line of JSON; None for none.
        picture: whether throughput.png is drawn.
        json: whether the report is printed as one JSON object, and nothing else.
        server_flags: extra arguments of every server that is started.
        command: the command line, for the report.
    """

    served: EmbeddedPair | GivenPair | RunningServers
    arm: tuple[str, ...]
    dataset: tuple[str, ...]
    dataset_file: Path | None
    cache_dir: Path
    levels: tuple[int, ...]
    block_size: tuple[int, ...]
    num_prompts: int
    max_new_tokens: int
    rounds: int
    thinking: str | None
    ignore_eos: bool | None
    simulated_acceptance: float | None
    dtype: str
    request_rate: float | None
    seed: int
    in_turn: bool
    port: int | None
    out: Path
    output_file: Path | None
    picture: bool
    json: bool
    server_flags: tuple[str, ...]
    command: str

    @property
    def model(self) -> str | None:
        """The embedded pair that is served, if it is known to be one."""
        match self.served:
            case EmbeddedPair(kind):
                return kind
            case RunningServers(model=model):
                return model
        return None

    @property
    def servers_at_once(self) -> int:
        """Servers started here that share the machine's memory."""
        if self.in_turn:
            return 1
        sizes = max(1, len(self.block_size))
        return sum(sizes if kind in BLOCK_KINDS else 1 for kind in self.arm)

    @property
    def random_weights(self) -> bool:
        """Whether servers read no weights: with simulated acceptance a given pair needs none."""
        chosen = any(flag.partition("=")[0] == "--load-format" for flag in self.server_flags)
        simulated = self.simulated_acceptance is not None
        return simulated and isinstance(self.served, GivenPair) and not chosen


@dataclass(frozen=True)
class Settings:
    """One comparison as asked for. `resolve` fills in what is None or empty.

    Raises:
        ConfigError: a value is out of range, or two do not go together.
    """

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
    request_rate: float | None = None
    seed: int = 0
    in_turn: bool | None = None
    port: int | None = None
    out: str = OUT
    output_file: str | None = None
    picture: bool = False
    json: bool = False
    server_flags: tuple[str, ...] = ()
    command: str = ""

    @classmethod
    def of(cls, given: dict[str, Any]) -> Settings:
        """From the command line's values: lists become tuples, other keys are left out.

        Raises:
            ConfigError: see the class.
        """
        names = {f.name for f in fields(cls)}
        taken: dict[str, Any] = {
            k: tuple(v) if isinstance(v, list) else v
            for k, v in given.items()
            if k in names and v is not None
        }
        return cls(**taken)

    def __post_init__(self) -> None:
        for name in self.dataset:
            check_name(name)
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
        self._check_load()

    def _check_what_is_served(self) -> None:
        if (self.target is None) != (self.draft is None) and not self.base_url:
            raise ConfigError(
                "--target and --draft: one without the other; "
                "give both, or neither for an embedded pair"
            )
        if self.model is not None and self.target is not None:
            raise ConfigError(
                f"--model: {self.model!r} is an embedded pair, and --target names another; "
                "give one of the two"
            )
        if not self.base_url:
            return
        launching: tuple[tuple[str, Any], ...] = (
            ("--arm", self.arm),
            ("--block-size", self.block_size),
            ("--simulated-acceptance", self.simulated_acceptance),
            ("--port", self.port),
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
                f"--dataset-file: {self.dataset_file!r} replaces --dataset; give one of the two"
            )

    def _check_load(self) -> None:
        if self.concurrency is not None:
            counts(self.concurrency)
        if self.request_rate is not None and not self.request_rate > 0:
            raise ConfigError(
                f"--request-rate: {self.request_rate:g}; a positive number of requests per second "
                "is required"
            )
        if self.seed < 0:
            raise ConfigError(f"--seed: {self.seed}; a number from 0 on is required")
        if self.port is not None and not 0 < self.port < 2**16:
            raise ConfigError(f"--port: {self.port}; a number from 1 to 65535 is required")

    def _check_simulation(self) -> None:
        length = self.simulated_acceptance
        if length is None:
            return
        if not 1 <= length < math.inf:
            raise ConfigError(
                f"--simulated-acceptance: {length:g}; a verify step commits 1 token or more"
            )
        if self.block_size:
            check_block(length, min(self.block_size))
        if "ngram" in self.arm:
            raise ConfigError(
                "--arm: 'ngram' drafts trees, and SGLang simulates chains only; "
                "leave it out with --simulated-acceptance"
            )
        if self.arm and not set(self.arm) & set(BLOCK_KINDS):
            raise ConfigError(
                f"--simulated-acceptance: {length:g}, but none of {', '.join(self.arm)} drafts; "
                "add --arm dflash or builtin"
            )
        if self.ignore_eos is False:
            raise ConfigError(
                "--no-ignore-eos: with --simulated-acceptance an end means nothing, "
                "and all arms answer at full length; leave it out"
            )

    def resolve(self, accelerator: bool) -> ResolvedSettings:
        """Fill in what depends on the machine: small on a CPU, of the published size elsewhere."""
        scale = ON_ACCELERATOR if accelerator else ON_CPU
        served = self._served()
        given = isinstance(served, GivenPair)
        embedded = isinstance(served, EmbeddedPair)
        dataset = self.dataset
        if not dataset and self.dataset_file is None:
            pair = served.kind if isinstance(served, EmbeddedPair) else self.model
            dataset = _DEFAULT_SETS.get(pair or "", ("demo", "stdlib") if pair else ("stdlib",))
        num_prompts = self.num_prompts or scale.num_prompts
        # An infinite rate is SGLang's spelling of none.
        rate = None if self.request_rate == math.inf else self.request_rate
        # With a rate it is the arrivals that limit the number of clients.
        clients = scale.concurrency if rate is None else str(num_prompts)
        return ResolvedSettings(
            served=served,
            arm=() if self.base_url else self.arm or ("ar", "dflash"),
            dataset=dataset,
            dataset_file=None if self.dataset_file is None else Path(self.dataset_file),
            cache_dir=Path(self.cache_dir) if self.cache_dir else default_cache(),
            levels=counts(self.concurrency or clients),
            block_size=self.block_size,
            num_prompts=num_prompts,
            max_new_tokens=self.max_new_tokens or scale.max_new_tokens,
            rounds=self.rounds or scale.rounds,
            thinking=self.thinking,
            # The end of random text means nothing: every arm answers at full length.
            ignore_eos=True if self.simulated_acceptance is not None else self.ignore_eos,
            simulated_acceptance=self.simulated_acceptance,
            # Large models are served in bfloat16; embedded pairs are here to be exact.
            dtype=self.dtype or ("bfloat16" if accelerator and not embedded else "float32"),
            request_rate=rate,
            seed=self.seed,
            # Two servers of one large model do not fit one accelerator.
            in_turn=accelerator and given if self.in_turn is None else self.in_turn,
            port=self.port,
            out=Path(self.out),
            output_file=None if self.output_file is None else Path(self.output_file),
            picture=self.picture,
            json=self.json,
            server_flags=self.server_flags,
            command=self.command,
        )

    def _served(self) -> EmbeddedPair | GivenPair | RunningServers:
        if self.base_url:
            servers = [
                (name, url) for name, _, url in (one.partition("=") for one in self.base_url)
            ]
            return RunningServers(tuple(servers), self.model, self.target)
        if self.target is not None and self.draft is not None:
            return GivenPair(self.target, self.draft)
        return EmbeddedPair(self.model or "dense")


def check_block(length: float, size: int) -> None:
    """Raise ConfigError if a simulated acceptance `length` exceeds the block size."""
    if length > size:
        raise ConfigError(
            f"--simulated-acceptance: {length:g}; "
            f"a verify step of block size {size} commits at most {size} tokens"
        )


def counts(text: str) -> tuple[int, ...]:
    """'1,8' to (1, 8). Raises ConfigError unless all are positive and different."""
    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError:
        found = ()
    if not found or min(found) < 1 or len(set(found)) != len(found):
        raise ConfigError(
            f"--concurrency: {text!r}; "
            "positive numbers of clients are required, each once, as in 1,8,16,32"
        )
    return found
