"""Parts of the experiment `gpu` that start servers: plain decoding, our worker, SGLang's built-in
one, all with a simulated acceptance length."""

from __future__ import annotations

import importlib.util
import random
import shlex
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sglang_dflash.bench import measure
from sglang_dflash.bench.server_config import FlagValue, ServerConfig, dflash_flags
from sglang_dflash.facts.errors import ConfigError

if TYPE_CHECKING:
    from sglang_dflash.bench.server import Server

ARMS = ("plain", "ours", "builtin")
START_TIMEOUT_S = 480
ROUNDS = 2
# Of our worker's report.
SHOWN = ("worker", "draft_attention", "draft_ops", "draft_graph_batch_sizes", "window")
# Ids that every vocabulary has.
IDS = range(10, 250)


@dataclass(frozen=True)
class Pair:
    """What the servers serve.

    Attributes:
        target, draft: checkpoints; both are empty if there are none.
        load_format: --load-format; with dummy, only the configs are read.
        accept: tokens that every verify step commits.
        levels: requests at a time and tokens of their prompts.
        new_tokens: of every answer.
        flags: for all servers.
        draft_flags: for the two that draft.
    """

    target: str
    draft: str
    load_format: str
    accept: float
    levels: tuple[tuple[int, int], ...]
    new_tokens: int
    flags: tuple[str, ...]
    draft_flags: tuple[str, ...]

    def obstacle(self) -> str | None:
        """Why no server can be started here, or None."""
        if not self.target or not self.draft:
            return "no checkpoint is given: --target and --draft"
        for package in ("sglang", "requests"):
            if importlib.util.find_spec(package) is None:
                return f"{package} cannot be imported"
        return None

    def arm(self, name: str) -> ServerConfig:
        """A server, by the name of its arm."""
        flags: dict[str, FlagValue] = {
            "--model-path": self.target,
            "--load-format": self.load_format,
        }
        if name == "plain":
            return ServerConfig(flags, extra_args=self.flags)
        flags |= dflash_flags(self.draft)
        if name == "builtin":
            flags["--speculative-dflash-worker"] = "builtin"
        simulated = {"SGLANG_SIMULATE_ACC_LEN": str(self.accept)}
        return ServerConfig(flags, extra_args=(*self.flags, *self.draft_flags), env=simulated)


def levels_of(text: str) -> tuple[tuple[int, int], ...]:
    """`--levels`: requests at a time and tokens of their prompts, "1x1024,32x32768". Raises
    ConfigError."""
    try:
        pairs = [tuple(map(int, level.split("x"))) for level in text.split(",")]
        found = tuple((requests, tokens) for requests, tokens in pairs)
    except ValueError:
        raise ConfigError(f"--levels: {text!r}; REQUESTSxTOKENS, as in 1x1024,32x32768") from None
    if any(requests < 1 or tokens < 1 for requests, tokens in found):
        raise ConfigError(f"--levels: {text!r}; at least 1 request of 1 token is required")
    return found


def words(text: str) -> tuple[str, ...]:
    """Flags for a server, split as a shell does."""
    return tuple(shlex.split(text))


def serve(pair: Pair, name: str) -> dict[str, Any]:
    """Decoding speed of an arm's server, by level. Raises ServerFailed."""
    from sglang_dflash.bench.server import Server

    result: dict[str, Any] = {}
    with Server(pair.arm(name), timeout_s=START_TIMEOUT_S) as server:
        shown = server.dflash()
        result["worker"] = {key: shown[key] for key in SHOWN if key in shown}
        for requests, tokens in pair.levels:
            result[f"{requests}x{tokens}"] = _level(server, requests, tokens, pair.new_tokens)
    return result


def _level(server: Server, requests: int, tokens: int, new_tokens: int) -> dict[str, float]:
    """Tokens per second of all requests together, without the prefill: the same prompts with long
    and with short answers, divided by each other's difference."""
    draw, few = random.Random(0), max(1, new_tokens // 8)
    prompts: Any = [draw.choices(IDS, k=tokens) for _ in range(requests)]
    measure.run(server, prompts, requests, few)
    rates, step_ms = [], []
    for _ in range(ROUNDS):
        short = measure.run(server, prompts, requests, few)
        long = measure.run(server, prompts, requests, new_tokens)
        seconds = max(long.seconds - short.seconds, 1e-9)
        rates.append((long.tokens - short.tokens) / seconds)
        steps = long.verify_steps - short.verify_steps
        step_ms.append(1000 * seconds * requests / max(steps, 1))
    return {
        "decode_tok_s": round(statistics.median(rates), 2),
        "step_ms": round(statistics.median(step_ms), 3),
        "spread": round(max(rates) / min(rates), 3),
    }


def ratios(served: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """By level, ours over plain decoding and over the built-in worker, in tokens per second. Goals
    over the latter: 1.05 at 1 request, 1.15 at 32 of 32k tokens."""
    found: dict[str, dict[str, float]] = {}
    ours = served.get("ours", {})
    for level, figures in ours.items():
        for other in ("plain", "builtin"):
            beside = served.get(other, {}).get(level)
            if level != "worker" and beside:
                ratio = figures["decode_tok_s"] / beside["decode_tok_s"]
                found.setdefault(level, {})[f"ours_over_{other}"] = round(ratio, 3)
    return found
