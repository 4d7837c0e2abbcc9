"""The arms of a comparison: ways of decoding, each behind a server that is started here or runs
already."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from sglang_dflash.checkpoint.published import look_up
from sglang_dflash.common.errors import ConfigError
from sglang_dflash.common.machine import available_bytes
from sglang_dflash.tools.bench import compiled, vllm
from sglang_dflash.tools.bench.load import Endpoint, endpoint
from sglang_dflash.tools.bench.server import (
    KV_TOKENS,
    FlagValue,
    Program,
    ServerConfig,
    ServerProcess,
    demo_config,
    dflash_flags,
    together,
)
from sglang_dflash.tools.bench.settings import VLLM_ARMS, WIDTH, BenchSettings
from sglang_dflash.tools.demo_pairs.pairs import demo_pair

SIMULATED_LENGTH = "SGLANG_SIMULATE_ACC_LEN"
# --max-running-requests of a server with drafts, where it is not given. Without drafts it is more.
RUNNING_WITH_DRAFTS = 48

# Arm -> the server to start, or the URL of one that runs.
Arms = dict[str, Program | str]


def arms_of(settings: BenchSettings, accelerator: bool) -> Arms:
    """The arms in the order of `settings.arms`; all others are compared with the first.

    Raises:
        ConfigError: the environment simulates acceptance, SGLang cannot serve the dtype, the
            embedded pair does not exist, or vLLM is not installed where `settings.vllm` says.
    """
    if settings.base_url:
        return dict(settings.servers)
    if SIMULATED_LENGTH in os.environ:
        required = "would reach every server unseen; unset it, and give {simulated_acceptance}"
        raise ConfigError(SIMULATED_LENGTH, os.environ[SIMULATED_LENGTH], required)
    names = settings.arms or ("ar", "dflash")
    if accelerator and settings.dtype == "float32" and not set(names) <= set(VLLM_ARMS):
        required = "SGLang's kernels on a GPU take 16 bits only; give bfloat16"
        raise ConfigError("dtype", settings.dtype, required)
    if settings.embedded:
        pair = demo_pair(settings.embedded)
        target, draft = str(pair.target), str(pair.draft)
        base = _embedded_server(settings)
    else:
        target, draft = settings.target or "", settings.draft or ""
        base = _given_server(settings)
    programs = {
        **_sglang_arms(settings, base, draft),
        **(_vllm_arms(settings, target, draft, accelerator) if settings.vllm else {}),
    }
    return {name: programs[name] for name in names}


def _sglang_arms(settings: BenchSettings, base: ServerConfig, draft: str) -> dict[str, Program]:
    """Return SGLang's arms: the server `base` with the flags of each arm."""
    fixed_width = dflash_flags(draft)
    # A user's own pair is measured as it would be served, with the default width. An embedded pair
    # verifies whole blocks, which shows the most that drafts can cost and gain.
    dflash = {
        name: value for name, value in fixed_width.items() if settings.embedded or name != WIDTH
    }
    simulated = {}
    if settings.simulated_acceptance is not None:
        dflash = fixed_width
        simulated = {
            SIMULATED_LENGTH: f"{settings.simulated_acceptance:g}",
            "SGLANG_SIMULATE_ACC_TOKEN_MODE": "real-draft-token",
        }
    flags: dict[str, dict[str, FlagValue]] = {
        "ar": {},
        "dflash": dflash,
        "builtin": {**fixed_width, "--speculative-dflash-worker": "builtin"},
    }
    return {
        name: replace(
            base.with_flags(arm_flags),
            # The user's own flags come last and win.
            extra_args=settings.server_flags,
            env={**compiled.ENVIRONMENT, **({} if name == "ar" else simulated)},
        )
        for name, arm_flags in flags.items()
    }


def _vllm_arms(
    settings: BenchSettings, target: str, draft: str, accelerator: bool
) -> dict[str, Program]:
    python = settings.vllm or ""
    version, requests = vllm.version_of(python, accelerator), max(settings.levels)
    # A prompt may have a thousand tokens.
    tokens = max(KV_TOKENS, requests * (settings.max_new_tokens + 1024))
    itemsize = 4 if settings.dtype == "float32" else 2
    # A server of a large model has the accelerator to itself, so its KV cache needs no bound.
    bounded = settings.embedded or not accelerator
    flags: dict[str, FlagValue] = {
        "--dtype": settings.dtype,
        **vllm.limits(target, tokens, requests, itemsize if bounded else None),
        # Ignore the sampling parameters in the target's generation_config.json.
        "--generation-config": "vllm",
    }
    if not accelerator:
        flags["--enforce-eager"] = True
    plain = vllm.VLLMConfig(python, version, target, None, flags, on_cpu=not accelerator)
    with_draft = {**flags, **vllm.dflash_flags(draft)}
    return {"vllm": plain, "vllm-dflash": replace(plain, draft=draft, flags=with_draft)}


def _embedded_server(settings: BenchSettings) -> ServerConfig:
    pair = demo_pair(settings.embedded or "")
    config = demo_config(pair, dflash=False).with_flags(_common_flags(settings))
    if not pair.is_hybrid:
        return config
    # Twice the clients: with few free request slots SGLang admits no new request.
    requests = 2 * max(settings.levels)
    return config.with_flags(
        {"--max-running-requests": requests, "--max-mamba-cache-size": 6 * requests}
    )


def _given_server(settings: BenchSettings) -> ServerConfig:
    flags: dict[str, FlagValue] = {
        "--model-path": settings.target or "",
        **_common_flags(settings),
    }
    if settings.simulated_acceptance is not None:
        # Outputs are not the target's anyway, so its weights are not read.
        flags["--load-format"] = "dummy"
    return ServerConfig(flags)


def _common_flags(settings: BenchSettings) -> dict[str, FlagValue]:
    # Streaming the whole text again at every step would slow down the slower arm more.
    flags: dict[str, FlagValue] = {
        "--dtype": settings.dtype,
        "--incremental-streaming-output": True,
    }
    if settings.temperature:
        flags["--enable-deterministic-inference"] = True
    if max(settings.levels) > RUNNING_WITH_DRAFTS:
        # All arms run as many at a time.
        flags["--max-running-requests"] = max(settings.levels)
    return flags


def group_arms(settings: BenchSettings, arms: Arms, accelerator: bool) -> list[Arms]:
    """Group the arms by the servers that run at once: one group if all servers fit the machine,
    else a group per arm. On an accelerator, a server takes most of the memory."""
    if settings.target is None or settings.base_url:
        return [arms]
    if not accelerator and _servers_fit(settings.target, len(arms)):
        return [arms]
    return [{name: arm} for name, arm in arms.items()]


def _servers_fit(target: str, servers: int) -> bool:
    """Return whether this many servers of a target are sure to fit the memory of this machine."""
    stored, available = look_up("target", target).weight_bytes, available_bytes()
    if stored is None or available is None:
        return False
    # 16-bit weights may be served in float32 (2x), and the pools may get as much again (2x). The
    # three processes of a server take 3 GiB.
    return servers * (4 * stored + (3 << 30)) <= available


@contextmanager
def open_endpoints(arms: Arms, settings: BenchSettings) -> Iterator[dict[str, Endpoint]]:
    """The endpoint of each arm. Servers that are started here run until the context ends.

    Raises:
        Failed: a server does not start, or a running one does not answer.
    """
    started = {
        name: ServerProcess(config, timeout_s=1800)
        for name, config in arms.items()
        if not isinstance(config, str)
    }
    with together(started.values()):
        endpoints = {
            name: endpoint(arm)
            if isinstance(arm, str)
            else arm.endpoint(started[name].url, started[name].log)
            for name, arm in arms.items()
        }
        yield {
            name: replace(address, sampling=settings.sampling(address.SEED))
            for name, address in endpoints.items()
        }
