"""Settings of a benchmark. Loads without torch and `requests`: `--help` reads it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from sglang_dflash.common.command_line import setting
from sglang_dflash.common.errors import ConfigError
from sglang_dflash.tools.bench.datasets import NAMES
from sglang_dflash.tools.bench.server import default_dtype
from sglang_dflash.tools.demo_pairs.public_target import KIND

# Defaults on an accelerator. Those of the fields are for two CPU cores: they measure the embedded
# dense pair in under ten minutes.
ON_ACCELERATOR = {"concurrency": "1,8,16,32", "num_prompts": 128, "max_new_tokens": 1024}
VLLM_ARMS = ("vllm", "vllm-dflash")
WIDTH = "--speculative-dflash-width"
# Arms that cannot be compared by a seed, and why.
_UNSEEDED = {"builtin": "samples without regard to a seed"} | dict.fromkeys(
    VLLM_ARMS, "has random numbers of its own"
)


@dataclass(frozen=True)
class BenchSettings:
    """Settings of one `sglang-dflash bench`.

    Raises:
        ConfigError: a value is out of range.
    """

    # What is compared.
    arms: tuple[str, ...] = setting(
        (),
        "repeat for more (default: ar and dflash); ratios are to the first. ar is plain decoding, "
        "builtin SGLang's own worker, vllm and vllm-dflash are vLLM's",
        choices=("ar", "dflash", "builtin", *VLLM_ARMS),
    )
    vllm: str | None = setting(
        None, "the Python of an environment with vLLM, for its arms", metavar="PYTHON"
    )
    base_url: tuple[str, ...] = setting(
        (),
        "a running server, SGLang or of the OpenAI API (vLLM), as an arm; repeat for more",
        metavar="NAME=URL",
    )
    pair: str | None = setting(
        None, "an embedded pair: dense, hybrid or smollm2 (default: {default})"
    )
    target: str | None = setting(
        None, "a folder or a hub name; of a running server, whose tokenizer it uses"
    )
    draft: str | None = setting(None, "a folder or a hub name")

    # What is asked.
    dataset: tuple[str, ...] = setting(
        (),
        f"{', '.join(NAMES)}; repeat for more (default: demo and stdlib; chat for smollm2)",
        metavar="NAME",
        choices=NAMES,
    )
    dataset_file: str | None = setting(
        None,
        'your own: lines {"prompt": TEXT}, and for the chat template {"turns": [TEXT, ...]}, '
        '{"messages": [...]} or ShareGPT\'s {"conversations": [...]}',
        metavar="FILE",
    )
    num_prompts: int = setting(
        16, "measured prompts of a data set; if it is given, they repeat (default: {default})"
    )
    seed: int = setting(0, "of the choice of prompts and of sampling (default: {default})")
    thinking: str | None = setting(
        None,
        "pass this to the chat template (default: the template decides)",
        choices=("on", "off"),
    )

    # How it is asked.
    concurrency: str = setting("1,8,16", "requests at a time (default: {default})", metavar="N")
    rounds: int = setting(3, "passes per arm and concurrency (default: {default})")
    max_new_tokens: int = setting(48, "per answer (default: {default})")
    temperature: float = setting(
        0.0, "0 is greedy (default); otherwise requests have a seed, so that arms can agree"
    )
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
        "what is computed in (default: float32 on a CPU, bfloat16 on a GPU, where SGLang serves 16 "
        "bits only); only in float32 must all outputs be equal. Of a running server: if it does "
        "not tell",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    server_flags: tuple[str, ...] = ()

    # What is written.
    out: str = setting(
        "bench-results", "gets results.json and table.md (default: {default})", metavar="DIR"
    )
    as_json: bool = setting(False, "print one JSON object in place of the table")
    picture: bool = setting(
        False,
        "also draw throughput.png in the folder of --out (needs matplotlib: sglang-dflash[bench])",
    )
    command: str = ""

    def __post_init__(self) -> None:
        require_positive(self, "num_prompts", "max_new_tokens", "rounds", "top_k")
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            required = "0 (greedy) or a positive number is required"
            raise ConfigError("temperature", self.temperature, required)
        if not 0 < self.top_p <= 1:
            raise ConfigError("top_p", self.top_p, "a number above 0 and up to 1 is required")
        if self.dataset and self.dataset_file is not None:
            raise ConfigError("dataset_file", self.dataset_file, "give it or {dataset}, not both")
        _ = self.levels

    @classmethod
    def for_machine(cls, fields: Mapping[str, Any], accelerator: bool) -> Self:
        """Make the settings of a comparison: `fields`, and defaults that fit the machine.

        Raises:
            ConfigError: a value is out of range, or two exclude each other.
        """
        values = {**(ON_ACCELERATOR if accelerator else {}), **fields}
        if values.get("dtype", "auto") == "auto" and not values.get("base_url"):
            values["dtype"] = default_dtype(accelerator)
        settings = cls(**values)
        if settings.embedded and "concurrency" not in fields:
            # An embedded pair has 16 texts only.
            settings = replace(settings, concurrency=cls.concurrency)
        _check_served(settings)
        return settings

    @property
    def levels(self) -> tuple[int, ...]:
        """Concurrency levels. Raises ConfigError."""
        try:
            levels = tuple(int(part) for part in self.concurrency.split(","))
        except ValueError:
            levels = ()
        if not levels or min(levels) < 1 or len(set(levels)) != len(levels):
            required = "positive numbers are required, each once, as in 1,8,16,32"
            raise ConfigError("concurrency", self.concurrency, required)
        return levels

    def sampling(self, seed: str) -> dict[str, float]:
        """Sampling parameters of a request. `seed`: the server's name of the seed."""
        if not self.temperature:
            return {"temperature": self.temperature}
        top_k = {} if self.top_k is None else {"top_k": self.top_k}
        return {"temperature": self.temperature, "top_p": self.top_p, **top_k, seed: self.seed}

    @property
    def warm_up_tokens(self) -> int:
        """New tokens per answer of the warm-up."""
        return min(16, self.max_new_tokens)

    @property
    def servers(self) -> dict[str, str]:
        """Running servers: name -> URL."""
        return {
            name: url
            for name, _, url in (arm_and_url.partition("=") for arm_and_url in self.base_url)
        }

    @property
    def embedded(self) -> str | None:
        """The name of the embedded pair that is measured; None for another pair."""
        return self.pair or (None if self.base_url or self.target else "dense")

    @property
    def datasets(self) -> tuple[str, ...]:
        """Names of the data sets; empty if a file of prompts is given."""
        if self.dataset or self.dataset_file is not None:
            return self.dataset
        if self.embedded == KIND:
            return ("chat",)
        return ("demo", "stdlib") if self.embedded else ("stdlib",)

    @property
    def own_text_pair(self) -> str | None:
        """The embedded pair, if all prompts are of its own data sets; None otherwise."""
        own_sets = ("chat",) if self.embedded == KIND else ("demo", "stdlib")
        chosen = self.datasets
        is_own = self.embedded and not self.base_url and chosen and set(chosen) <= set(own_sets)
        return self.embedded if is_own else None

    @property
    def verifies_whole_blocks(self) -> bool:
        """True if the arm dflash has a fixed width where a server on a CPU would be adaptive."""
        # With one of these, a server's width is fixed by default, too.
        if self.temperature or self.simulated_acceptance is not None or self.base_url:
            return False
        sets_width = any(flag.startswith(WIDTH) for flag in self.server_flags)
        runs_dflash = not self.arms or "dflash" in self.arms
        return bool(self.embedded and runs_dflash and not sets_width)


def require_positive(settings: BenchSettings, *fields: str) -> None:
    """Raise ConfigError if one of these fields is given and no positive number."""
    for field in fields:
        value = getattr(settings, field)
        if value is not None and not value > 0:
            raise ConfigError(field, value, "a positive number is required")


def _check_served(settings: BenchSettings) -> None:
    """Raise ConfigError unless the settings say which servers are compared."""
    if (settings.target is None) != (settings.draft is None) and not settings.base_url:
        required = "give {target} and {draft}, or neither for an embedded pair"
        raise ConfigError("draft", settings.draft, required)
    if settings.pair is not None and settings.target is not None:
        raise ConfigError("pair", settings.pair, "give an embedded pair or {target}, not both")
    length = settings.simulated_acceptance
    if length is not None and not 1 <= length < math.inf:
        required = "a verify step commits 1 token or more"
        raise ConfigError("simulated_acceptance", length, required)
    for arm in settings.arms if settings.temperature else ():
        if arm in _UNSEEDED:
            required = f"{_UNSEEDED[arm]}; with {{temperature}} arms are compared by it"
            raise ConfigError("arms", arm, required)
    if len(set(settings.arms)) != len(settings.arms):
        raise ConfigError("arms", settings.arms, "give every one once")
    if not settings.base_url:
        _check_vllm(settings)
        return
    for field in ("arms", "vllm", "simulated_acceptance", "server_flags"):
        value = getattr(settings, field)
        if value:
            required = "is for servers that are started here; with {base_url} none is"
            raise ConfigError(field, value, required)
    for arm_and_url in settings.base_url:
        name, _, url = arm_and_url.partition("=")
        if not name or not url.startswith(("http://", "https://")):
            required = "NAME=URL is required, as in vllm=http://localhost:8000"
            raise ConfigError("base_url", arm_and_url, required)
    if len(settings.servers) != len(settings.base_url):
        raise ConfigError("base_url", settings.base_url, "give every name once")


def _check_vllm(settings: BenchSettings) -> None:
    """Raise ConfigError unless vLLM's arms and its Python are given together."""
    vllm_arms = [arm for arm in settings.arms if arm in VLLM_ARMS]
    if vllm_arms and settings.vllm is None:
        required = f"missing; the arm {vllm_arms[0]} needs the Python of an environment with vLLM"
        raise ConfigError("vllm", required=required)
    if settings.vllm is not None and not vllm_arms:
        required = f"no arm is vLLM's; give {{arms}} {' or '.join(VLLM_ARMS)}"
        raise ConfigError("vllm", settings.vllm, required)
    if vllm_arms and settings.simulated_acceptance is not None:
        required = "simulates no acceptance; leave out {simulated_acceptance}"
        raise ConfigError("arms", vllm_arms[0], required)
