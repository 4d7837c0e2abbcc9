"""What a benchmark is asked for. Loads without torch and `requests`: `--help` reads it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from sglang_dflash.bench.datasets import NAMES, check_name, default_cache
from sglang_dflash.facts.command_line import setting
from sglang_dflash.facts.errors import ConfigError

# Those that draft blocks: their block size can be chosen, and their acceptance simulated.
BLOCK_ARMS = ("dflash", "builtin")
# What is measured on an accelerator if nothing else is asked for. The fields' own defaults are for
# two cores: the embedded dense pair in under ten minutes.
ON_ACCELERATOR = {"concurrency": "1,8,16,32", "num_prompts": 128, "max_new_tokens": 1024}


@dataclass(frozen=True)
class BenchSettings:
    """One comparison of `sglang-dflash bench`, or one run of the published command, all decided.

    Raises:
        ConfigError: a value is out of range.
    """

    # What is compared.
    arms: tuple[str, ...] = setting(
        (),
        "repeat for more (default: ar and dflash); ratios are to the first. ar is plain decoding, "
        "builtin SGLang's own worker, ngram its n-gram drafts (on an accelerator)",
        choices=("ar", *BLOCK_ARMS, "ngram"),
    )
    block_size: tuple[int, ...] = setting(
        (), "tokens verified per step (default: the draft's); repeat for an arm per size"
    )
    base_url: tuple[str, ...] = setting(
        (),
        "a running server, SGLang or of the OpenAI API (vLLM), as an arm; repeat for more",
        metavar="NAME=URL",
    )
    backend: str = setting(
        "sglang",
        "a running server, or a pair over Transformers",
        choices=("sglang", "vllm", "transformers"),
    )
    url: str = setting("http://127.0.0.1:30000", "of the running server (default: {default})")
    pair: str | None = setting(None, "an embedded pair: code, dense or hybrid (default: {default})")
    target: str | None = setting(
        None, "a folder or a hub name; of a running server, whose tokenizer it uses"
    )
    draft: str | None = setting(None, "a folder or a hub name")
    window: int | None = setting(None, "committed tokens that the draft attends to (default: all)")

    # What is asked.
    dataset: tuple[str, ...] = setting(
        (),
        f"{', '.join(NAMES)}; repeat for more (default: demo and stdlib; unseen for the code pair)",
        metavar="NAME",
    )
    dataset_file: str | None = setting(
        None,
        'lines {"prompt": TEXT}, or {"turns": [TEXT, ...]} for the chat template',
        metavar="JSONL",
    )
    cache_dir: str | None = setting(
        None, "folder of fetched data sets (default: sglang-dflash/datasets in the user's cache)"
    )
    num_prompts: int = setting(16, "measured prompts of a data set (default: {default})")
    max_samples: int | None = setting(None, "prompts at most (default: all)")
    seed: int = setting(
        0, "of the choice of prompts, times to send and sampling (default: {default})"
    )
    thinking: str | None = setting(
        None,
        "pass this to the chat template (default: the template decides)",
        choices=("on", "off"),
    )

    # How it is asked.
    concurrency: str = setting(
        "1,8,16",
        "requests at a time (default: {default})",
        metavar="N",
    )
    request_rate: float | None = setting(
        None,
        "send R requests per second, at random times (default: as soon as a client is free)",
        metavar="R",
    )
    rounds: int = setting(3, "passes per arm and concurrency (default: {default})")
    timeout_s: float = setting(3600, "of a request (default: {default})")
    max_new_tokens: int = setting(48, "per answer (default: {default})")
    ignore_eos: bool | None = setting(
        None, "generate past the end token (default: for plain texts, not for chats)"
    )
    temperature: float = setting(0.0, "0 is greedy (default)")
    top_p: float = setting(1.0, "default: {default}")
    top_k: int | None = setting(None, "default: all tokens")
    simulated_acceptance: float | None = setting(
        None,
        "for timing: every verify step commits L tokens, right or wrong; outputs mean nothing and "
        "are not compared, and of --target and --draft only configs and tokenizer are read",
        metavar="L",
    )

    # Where it runs.
    dtype: str = setting(
        "auto",
        "what is computed in (default: float32 on a CPU and for embedded pairs, else bfloat16); "
        "only in float32 must all outputs be equal",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    device: str | None = setting(None, "as torch names it (default: a GPU per rank, or cpu)")
    in_turn: bool | None = setting(
        None, "one server after another (default: for given models on an accelerator)"
    )
    port: int | None = setting(
        None,
        "of the first server that is started here, the next ones for the others "
        "(default: free ones)",
    )
    server_flags: tuple[str, ...] = ()

    # What is written.
    out: str = setting(
        "bench-results", "gets results.json and table.md (default: {default})", metavar="DIR"
    )
    output_file: str | None = setting(
        None, "also write the report to this file, as JSON", metavar="FILE"
    )
    picture: bool = setting(
        False,
        "also draw throughput.png in the folder of --out (needs matplotlib: sglang-dflash[bench])",
    )
    json: bool = setting(False, "print the report as one JSON object, and nothing else")
    command: str = ""

    def __post_init__(self) -> None:
        for name in self.dataset:
            check_name(name)
        positive = ("num_prompts", "max_samples", "max_new_tokens", "rounds")
        for field in (*positive, "timeout_s", "request_rate", "top_k"):
            value = getattr(self, field)
            if value is not None and not value > 0:
                raise ConfigError(field, value, "a positive number is required")
        for size in self.block_size:
            if size < 2:
                raise ConfigError("block_size", size, "a block has at least 2 tokens")
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            required = "0 (greedy) or a positive number is required"
            raise ConfigError("temperature", self.temperature, required)
        if not 0 < self.top_p <= 1:
            raise ConfigError("top_p", self.top_p, "a number above 0 and up to 1 is required")
        if not 0 <= self.seed < 2**31:
            raise ConfigError("seed", self.seed, "a number from 0 to 2**31 - 1 is required")
        if self.port is not None and not 0 < self.port < 2**16:
            raise ConfigError("port", self.port, "a number from 1 to 65535 is required")
        if self.dataset and self.dataset_file is not None:
            raise ConfigError("dataset_file", self.dataset_file, "give it or {dataset}, not both")
        _ = self.levels

    @classmethod
    def for_machine(cls, given: Mapping[str, Any], accelerator: bool) -> Self:
        """A comparison: what is given, and otherwise what fits the machine.

        Raises:
            ConfigError: a value is out of range, or two do not go together.
        """
        values = dict(given)
        if values.get("request_rate") == math.inf:
            # SGLang's spelling of none.
            del values["request_rate"]
        large = accelerator and ("target" in values or "base_url" in values)
        if values.get("dtype", "auto") == "auto":
            # Large models are served in bfloat16; embedded pairs are here to be exact.
            values["dtype"] = "bfloat16" if large else "float32"
        # Two servers of one large model do not fit one accelerator.
        values.setdefault("in_turn", large and "base_url" not in values)
        scale = dict(ON_ACCELERATOR if accelerator else {})
        if "request_rate" in values:
            # The arrivals limit the number of clients.
            prompts = scale.get("num_prompts", cls.num_prompts)
            scale["concurrency"] = str(values.get("num_prompts", prompts))
        values = {**scale, **values}
        settings = cls(**values)
        _check_served(settings)
        _check_simulation(settings)
        # The end of random text means nothing: every arm answers at full length.
        whole = settings.simulated_acceptance is not None
        return replace(settings, ignore_eos=True) if whole else settings

    @property
    def levels(self) -> tuple[int, ...]:
        """Concurrency levels. Raises ConfigError."""
        try:
            found = tuple(int(part) for part in self.concurrency.split(","))
        except ValueError:
            found = ()
        if not found or min(found) < 1 or len(set(found)) != len(found):
            required = "positive numbers are required, each once, as in 1,8,16,32"
            raise ConfigError("concurrency", self.concurrency, required)
        return found

    @property
    def kinds(self) -> tuple[str, ...]:
        """Ways of decoding on servers that are started here."""
        return self.arms or ("ar", "dflash")

    @property
    def servers(self) -> dict[str, str]:
        """Running servers: name -> URL."""
        return {name: url for name, _, url in (one.partition("=") for one in self.base_url)}

    @property
    def embedded(self) -> str | None:
        """The embedded pair that is served, if it is known to be one."""
        return self.pair or (None if self.base_url or self.target else "dense")

    @property
    def datasets(self) -> tuple[str, ...]:
        """Names of data sets; none if there is a file."""
        if self.dataset or self.dataset_file is not None:
            return self.dataset
        if self.embedded == "code":
            return ("unseen",)
        return ("demo", "stdlib") if self.embedded else ("stdlib",)

    @property
    def cache(self) -> Path:
        """Folder of fetched data sets."""
        return Path(self.cache_dir) if self.cache_dir else default_cache()

    @property
    def random_weights(self) -> bool:
        """Whether servers read no weights: with simulated acceptance a given pair needs none."""
        chosen = any(flag.partition("=")[0] == "--load-format" for flag in self.server_flags)
        return self.simulated_acceptance is not None and self.embedded is None and not chosen


def check_block(length: float, size: int) -> None:
    """Raise ConfigError if a simulated acceptance `length` exceeds the block size."""
    if length > size:
        required = f"a verify step of block size {size} commits at most {size} tokens"
        raise ConfigError("simulated_acceptance", length, required)


def _check_served(settings: BenchSettings) -> None:
    """Whether it is clear what is compared."""
    if (settings.target is None) != (settings.draft is None) and not settings.base_url:
        required = "give {target} and {draft}, or neither for an embedded pair"
        raise ConfigError("draft", settings.draft, required)
    if settings.pair is not None and settings.target is not None:
        raise ConfigError("pair", settings.pair, "give an embedded pair or {target}, not both")
    for field, names in (("arms", settings.arms), ("block_size", settings.block_size)):
        if len(set(names)) != len(names):
            raise ConfigError(field, names, "give every one once")
    if not settings.base_url:
        return
    for field in ("arms", "block_size", "simulated_acceptance", "port", "server_flags"):
        value = getattr(settings, field)
        if value:
            required = "is for servers that are started here; with {base_url} none is"
            raise ConfigError(field, value, required)
    for one in settings.base_url:
        name, _, url = one.partition("=")
        if not name or not url.startswith(("http://", "https://")):
            required = "NAME=URL is required, as in vllm=http://localhost:8000"
            raise ConfigError("base_url", one, required)
    if len(settings.servers) != len(settings.base_url):
        raise ConfigError("base_url", settings.base_url, "give every name once")


def _check_simulation(settings: BenchSettings) -> None:
    length = settings.simulated_acceptance
    if length is None:
        return
    if not 1 <= length < math.inf:
        required = "a verify step commits 1 token or more"
        raise ConfigError("simulated_acceptance", length, required)
    if settings.block_size:
        check_block(length, min(settings.block_size))
    if "ngram" in settings.arms:
        required = "drafts trees, and SGLang simulates chains only; leave it out"
        raise ConfigError("arms", "ngram", required)
    if not set(settings.kinds) & set(BLOCK_ARMS):
        required = "none of {arms} drafts; add dflash or builtin"
        raise ConfigError("simulated_acceptance", length, required)
    if settings.ignore_eos is False:
        required = "an end means nothing with {simulated_acceptance}; leave it out"
        raise ConfigError("ignore_eos", False, required)
