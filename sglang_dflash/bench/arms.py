"""What is compared: ways of decoding, each behind a server that is started here or runs already."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from sglang_dflash.bench.load import Endpoint, SGLang, endpoint
from sglang_dflash.bench.server import Server, together
from sglang_dflash.bench.server_config import FlagValue, ServerConfig, demo_config, dflash_flags
from sglang_dflash.bench.settings import BLOCK_ARMS, BenchSettings, check_block
from sglang_dflash.facts.draft_config import DraftConfig
from sglang_dflash.facts.embedded import demo_pair
from sglang_dflash.facts.errors import ConfigError, UnsupportedDraft

_SIMULATION = "SGLANG_SIMULATE_ACC_"
# Share of the memory that servers side by side take together for weights and KV; the rest is for
# other processes.
MEMORY_SHARED = 0.6
# KV tokens of a request of the data set "unseen-long": the document and its answer, with room.
LONG_TOKENS = 9216

# Arm -> the server to start, or the URL of one that runs.
Arms = dict[str, ServerConfig | str]


def arms_of(settings: BenchSettings, accelerator: bool) -> Arms:
    """The arms in the order asked for; the others are compared with the first.

    Raises:
        ConfigError: an arm cannot be served on this machine.
    """
    if settings.base_url:
        return dict(settings.servers)
    if "ngram" in settings.arms and not accelerator:
        required = "needs SGLang's compiled kernels, which load on an accelerator only"
        raise ConfigError("arms", "ngram", required)
    if settings.embedded:
        pair = demo_pair(settings.embedded)
        target, draft = str(pair.target), str(pair.draft)
    else:
        target, draft = settings.target or "", settings.draft or ""
    _check_simulation(settings, draft)
    # Name -> kind, and the flags of its block size.
    arms: dict[str, tuple[str, dict[str, FlagValue]]] = {}
    for kind in settings.kinds:
        for size in settings.block_size if kind in BLOCK_ARMS else ():
            arms[f"{kind}@{size}"] = kind, {"--speculative-num-draft-tokens": size}
        if not settings.block_size or kind not in BLOCK_ARMS:
            arms[kind] = kind, {}
    if settings.embedded:
        base = _embedded_server(settings)
    else:
        base = _given_server(settings, target, accelerator, len(arms))
    return {
        name: _arm_server(settings, kind, base, draft).with_flags(block)
        for name, (kind, block) in arms.items()
    }


def _check_simulation(settings: BenchSettings, draft: str) -> None:
    for name, value in os.environ.items():
        if name.startswith(_SIMULATION):
            required = "would reach every server unseen; unset it, and give {simulated_acceptance}"
            raise ConfigError(name, value, required)
    # Only its server fetches a draft from the hub; the report says if less was committed.
    if settings.simulated_acceptance is None or settings.block_size or not Path(draft).is_dir():
        return
    try:
        check_block(settings.simulated_acceptance, DraftConfig.from_pretrained(draft).block_size)
    except UnsupportedDraft:
        # The built-in worker serves it, and reads its block size itself.
        return


def _embedded_server(settings: BenchSettings) -> ServerConfig:
    pair = demo_pair(settings.embedded or "")
    config = demo_config(pair, dflash=False)
    if "unseen-long" in settings.datasets:
        config = config.with_flags({"--max-total-tokens": LONG_TOKENS * max(settings.levels)})
    if not pair.is_hybrid:
        return config
    # Twice the clients: with few free request slots SGLang admits no new request.
    requests = 2 * max(settings.levels)
    return config.with_flags(
        {"--max-running-requests": requests, "--max-mamba-cache-size": 6 * requests}
    )


def _given_server(
    settings: BenchSettings, target: str, accelerator: bool, arms: int
) -> ServerConfig:
    flags: dict[str, FlagValue] = {"--model-path": target}
    if not accelerator:
        flags["--sleep-on-idle"] = True
    if settings.random_weights:
        flags["--load-format"] = "dummy"
    if arms > 1 and not settings.in_turn:
        # By default each would take almost all of the memory.
        flags["--mem-fraction-static"] = f"{MEMORY_SHARED / arms:.3f}"
    return ServerConfig(flags)


def _arm_server(settings: BenchSettings, kind: str, base: ServerConfig, draft: str) -> ServerConfig:
    """The server of a kind of arm; the user's own flags come last and win."""
    dflash = dflash_flags(draft)
    by_kind: dict[str, dict[str, FlagValue]] = {
        "ar": {},
        "dflash": dflash,
        "builtin": {**dflash, "--speculative-dflash-worker": "builtin"},
        "ngram": {"--speculative-algorithm": "NGRAM"},
    }
    flags: dict[str, FlagValue] = {
        "--dtype": settings.dtype,
        # To stream the whole text with every step costs the slower arm more than the faster one.
        "--incremental-streaming-output": True,
    }
    env = {}
    if settings.simulated_acceptance is not None and kind in BLOCK_ARMS:
        env[f"{_SIMULATION}LEN"] = f"{settings.simulated_acceptance:g}"
        env[f"{_SIMULATION}TOKEN_MODE"] = "real-draft-token"
    config = base.with_flags(flags | by_kind[kind])
    return replace(config, extra_args=settings.server_flags, env=env)


@contextmanager
def opened(
    arms: Arms, timeout_s: float = 1800, port: int | None = None
) -> Iterator[dict[str, Endpoint]]:
    """The arms' endpoints. Servers that are started here all run at once, until the end.

    Args:
        port: of the first server that is started, the next ones for the others; None for any.

    Raises:
        ServerFailed: a server does not start.
        RequestFailed: a running server does not answer.
    """
    started: dict[str, Server] = {}
    for name, server in arms.items():
        if isinstance(server, ServerConfig):
            at = None if port is None else port + len(started)
            started[name] = Server(server, timeout_s=timeout_s, port=at)
    with together(started.values()):
        yield {
            name: endpoint(server) if isinstance(server, str) else SGLang(started[name].url)
            for name, server in arms.items()
        }
