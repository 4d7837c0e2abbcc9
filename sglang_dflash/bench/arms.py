"""What is compared: ways of decoding, each behind a server that is started here or runs already."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from sglang_dflash.bench.load import Endpoint, SGLang, endpoint
from sglang_dflash.bench.server import Server, together
from sglang_dflash.bench.server_config import FlagValue, ServerConfig, demo_config, dflash_flags
from sglang_dflash.bench.settings import (
    BLOCK_KINDS,
    EmbeddedPair,
    GivenPair,
    ResolvedSettings,
    RunningServers,
    check_block,
)
from sglang_dflash.facts.draft_config import DraftConfig
from sglang_dflash.facts.embedded import DemoPair, demo_pair
from sglang_dflash.facts.errors import ConfigError, UnsupportedDraft

_SIMULATION = "SGLANG_SIMULATE_ACC_"
# Share of the memory that servers side by side take together for weights and KV; the rest is for
# other processes.
MEMORY_SHARED = 0.6
# KV tokens of a request of the data set "unseen-long": the document and its answer, with room.
LONG_TOKENS = 9216


@dataclass(frozen=True)
class Arm:
    """A way of decoding: `server` is what to start, or the URL of a running server."""

    name: str
    server: ServerConfig | str


def arms_of(settings: ResolvedSettings, accelerator: bool) -> list[Arm]:
    """The arms in the order asked for; the others are compared with the first.

    Raises:
        ConfigError: an arm cannot be served on this machine.
    """
    served = settings.served
    if isinstance(served, RunningServers):
        return [Arm(name, url) for name, url in served.servers]
    if "ngram" in settings.arm and not accelerator:
        raise ConfigError(
            "--arm: 'ngram' needs SGLang's compiled kernels, which load on an accelerator only; "
            "leave it out here"
        )
    target, draft = _checkpoints(served)
    _check_simulation(settings, draft)
    if isinstance(served, EmbeddedPair):
        base = _embedded_server(settings, demo_pair(served.kind))
    else:
        base = _given_server(settings, target, accelerator)
    arms = []
    for kind in settings.arm:
        config = _arm_server(settings, kind, base, draft)
        sizes = settings.block_size if kind in BLOCK_KINDS else ()
        arms += [
            Arm(f"{kind}@{size}", config.with_flags({"--speculative-num-draft-tokens": size}))
            for size in sizes
        ] or [Arm(kind, config)]
    return arms


def _checkpoints(served: EmbeddedPair | GivenPair) -> tuple[str, str]:
    """Target and draft."""
    if isinstance(served, GivenPair):
        return served
    pair = demo_pair(served.kind)
    return str(pair.target), str(pair.draft)


def _check_simulation(settings: ResolvedSettings, draft: str) -> None:
    for name, value in os.environ.items():
        if name.startswith(_SIMULATION):
            raise ConfigError(
                f"{name}: {value!r} would reach every server unseen; "
                "unset it, and give --simulated-acceptance if meant"
            )
    length = settings.simulated_acceptance
    if length is None or settings.block_size:
        return
    if not Path(draft).is_dir():
        # Only its server fetches a draft from the hub; the report says if less was committed.
        return
    try:
        check_block(length, DraftConfig.from_pretrained(draft).block_size)
    except UnsupportedDraft:
        # The built-in worker serves it, and reads its block size itself.
        return


def _embedded_server(settings: ResolvedSettings, pair: DemoPair) -> ServerConfig:
    config = demo_config(pair, dflash=False)
    if "unseen-long" in settings.dataset:
        config = config.with_flags({"--max-total-tokens": LONG_TOKENS * max(settings.levels)})
    if not pair.is_hybrid:
        return config
    # Twice the clients: with few free request slots SGLang admits no new request.
    requests = 2 * max(settings.levels)
    return config.with_flags(
        {"--max-running-requests": requests, "--max-mamba-cache-size": 6 * requests}
    )


def _given_server(settings: ResolvedSettings, target: str, accelerator: bool) -> ServerConfig:
    flags: dict[str, FlagValue] = {"--model-path": target}
    if not accelerator:
        flags["--sleep-on-idle"] = True
    if settings.random_weights:
        flags["--load-format"] = "dummy"
    if settings.servers_at_once > 1:
        # By default each would take almost all of the memory.
        flags["--mem-fraction-static"] = f"{MEMORY_SHARED / settings.servers_at_once:.3f}"
    return ServerConfig(flags)


def _arm_server(
    settings: ResolvedSettings, kind: str, base: ServerConfig, draft: str
) -> ServerConfig:
    """The server of a kind of arm; the user's own flags come last and win."""
    dflash = dflash_flags(draft)
    builtin: dict[str, FlagValue] = {**dflash, "--speculative-dflash-worker": "builtin"}
    no_overlap: dict[str, FlagValue] = {"--disable-overlap-schedule": True}
    by_kind: dict[str, dict[str, FlagValue]] = {
        "ar": {},
        "ar-no-overlap": no_overlap,
        "dflash": dflash,
        "dflash-adaptive": {**dflash, "--speculative-dflash-width": "adaptive"},
        "dflash-no-overlap": dflash | no_overlap,
        "builtin": builtin,
        "builtin-no-overlap": builtin | no_overlap,
        "ngram": {"--speculative-algorithm": "NGRAM"},
    }
    flags: dict[str, FlagValue] = {
        "--dtype": settings.dtype,
        # To stream the whole text with every step costs the slower arm more than the faster one.
        "--incremental-streaming-output": True,
    }
    env = {}
    if settings.simulated_acceptance is not None and kind in BLOCK_KINDS:
        env[f"{_SIMULATION}LEN"] = f"{settings.simulated_acceptance:g}"
        env[f"{_SIMULATION}TOKEN_MODE"] = "real-draft-token"
    config = base.with_flags(flags | by_kind[kind])
    return replace(config, extra_args=settings.server_flags, env=env)


@contextmanager
def opened(
    arms: list[Arm], timeout_s: float = 1800, port: int | None = None
) -> Iterator[dict[str, Endpoint]]:
    """The arms' endpoints by name. Servers that are started here all run at once, until the end.

    Args:
        port: of the first server that is started, the next ones for the others; None for any.

    Raises:
        ServerFailed: a server does not start.
        RequestFailed: a running server does not answer.
    """
    started: dict[str, Server] = {}
    for arm in arms:
        if isinstance(arm.server, ServerConfig):
            at = None if port is None else port + len(started)
            started[arm.name] = Server(arm.server, timeout_s=timeout_s, port=at)
    with together(started.values()):
        yield {
            arm.name: endpoint(arm.server)
            if isinstance(arm.server, str)
            else SGLang(started[arm.name].url)
            for arm in arms
        }
