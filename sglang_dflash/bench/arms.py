"""What is compared: ways of decoding, each behind a server that is started here or runs already."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from sglang_dflash.bench.load import Endpoint, SGLang, endpoint
from sglang_dflash.bench.server import (
    FlagValue,
    Server,
    ServerConfig,
    demo_config,
    dflash_flags,
    dtype_flags,
    together,
)
from sglang_dflash.bench.settings import BenchSettings
from sglang_dflash.facts.embedded import demo_pair
from sglang_dflash.facts.errors import ConfigError

SIMULATED_LENGTH = "SGLANG_SIMULATE_ACC_LEN"

# Arm -> the server to start, or the URL of one that runs.
Arms = dict[str, ServerConfig | str]


def arms_of(settings: BenchSettings, accelerator: bool) -> Arms:
    """The arms in the order asked for; the others are compared with the first.

    Raises:
        ConfigError: the environment simulates acceptance, or there is no such embedded pair.
    """
    if settings.base_url:
        return dict(settings.servers)
    if SIMULATED_LENGTH in os.environ:
        required = "would reach every server unseen; unset it, and give {simulated_acceptance}"
        raise ConfigError(SIMULATED_LENGTH, os.environ[SIMULATED_LENGTH], required)
    names = settings.arms or ("ar", "dflash")
    if settings.embedded:
        draft = str(demo_pair(settings.embedded).draft)
        base = _embedded_server(settings, accelerator)
    else:
        draft = settings.draft or ""
        base = _given_server(settings, accelerator)
    dflash = dflash_flags(draft)
    flags: dict[str, dict[str, FlagValue]] = {
        "ar": {},
        "dflash": dflash,
        "builtin": {**dflash, "--speculative-dflash-worker": "builtin"},
    }
    simulated = {}
    if settings.simulated_acceptance is not None:
        simulated = {
            SIMULATED_LENGTH: f"{settings.simulated_acceptance:g}",
            "SGLANG_SIMULATE_ACC_TOKEN_MODE": "real-draft-token",
        }
    return {
        name: replace(
            base.with_flags(flags[name]),
            # The user's own flags come last and win.
            extra_args=settings.server_flags,
            env={} if name == "ar" else simulated,
        )
        for name in names
    }


def _embedded_server(settings: BenchSettings, accelerator: bool) -> ServerConfig:
    pair = demo_pair(settings.embedded or "")
    config = demo_config(pair, dflash=False).with_flags(_for_all(settings, accelerator))
    if not pair.is_hybrid:
        return config
    # Twice the clients: with few free request slots SGLang admits no new request.
    requests = 2 * max(settings.levels)
    return config.with_flags(
        {"--max-running-requests": requests, "--max-mamba-cache-size": 6 * requests}
    )


def _given_server(settings: BenchSettings, accelerator: bool) -> ServerConfig:
    flags: dict[str, FlagValue] = {
        "--model-path": settings.target or "",
        **_for_all(settings, accelerator),
    }
    if not accelerator:
        flags["--sleep-on-idle"] = True
    if settings.simulated_acceptance is not None:
        # No answer means anything, so no weights are read.
        flags["--load-format"] = "dummy"
    return ServerConfig(flags)


def _for_all(settings: BenchSettings, accelerator: bool) -> dict[str, FlagValue]:
    # To stream the whole text with every step costs the slower arm more than the faster one.
    flags: dict[str, FlagValue] = {
        **dtype_flags(settings.dtype, accelerator),
        "--incremental-streaming-output": True,
    }
    return flags | ({"--enable-deterministic-inference": True} if settings.temperature else {})


@contextmanager
def opened(arms: Arms, settings: BenchSettings) -> Iterator[dict[str, Endpoint]]:
    """The arms' endpoints. Servers that are started here all run at once, until the end.

    Raises:
        Failed: a server does not start, or a running one does not answer.
    """
    started = {
        name: Server(config, timeout_s=1800)
        for name, config in arms.items()
        if isinstance(config, ServerConfig)
    }
    with together(started.values()):
        found = {
            name: endpoint(server) if isinstance(server, str) else SGLang(started[name].url)
            for name, server in arms.items()
        }
        yield {name: replace(to, sampling=settings.sampling(to.SEED)) for name, to in found.items()}
