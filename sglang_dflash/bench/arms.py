"""What is compared: ways of decoding, each behind a server that is started here or runs already."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from sglang_dflash.bench.demo import server_args
from sglang_dflash.bench.load import Endpoint, SGLang, endpoint
from sglang_dflash.bench.server import Server, together
from sglang_dflash.bench.settings import BLOCK_KINDS, Settings
from sglang_dflash.checkpoint.draft_config import DraftConfig
from sglang_dflash.checkpoint.embedded import demo_pair
from sglang_dflash.checkpoint.errors import ConfigError, UnsupportedDraft

_SIMULATION = "SGLANG_SIMULATE_ACC_"
# Share of the memory that servers side by side take for weights and KV, all together; the rest is for what runs beside.
MEMORY_SHARED = 0.6


@dataclass(frozen=True)
class Arm:
    """`flags` and environment (`env`) of the server to start, or the `url` of a running one."""

    name: str
    flags: tuple[str, ...] = ()
    url: str | None = None
    env: dict[str, str] = field(default_factory=dict)


def arms_of(settings: Settings, accelerator: bool) -> list[Arm]:
    """The arms of resolved settings, in the order asked for; the first is what the others are compared with.

    Raises:
        ConfigError: an arm cannot be served on this machine.
    """
    if settings.base_url:
        return [
            Arm(name, url=url) for name, _, url in (one.partition("=") for one in settings.base_url)
        ]
    if "ngram" in settings.arm and not accelerator:
        raise ConfigError(
            "--arm: 'ngram' needs SGLang's compiled kernels, which load on an accelerator only; leave it out here"
        )
    _check_simulation(settings)
    arms = []
    for kind in settings.arm:
        sizes, env = settings.block_size if kind in BLOCK_KINDS else (), environment(settings, kind)
        arms += [
            Arm(f"{kind}@{size}", flags(settings, kind, accelerator, size), env=env)
            for size in sizes
        ] or [Arm(kind, flags(settings, kind, accelerator), env=env)]
    return arms


def _check_simulation(settings: Settings) -> None:
    for name, value in os.environ.items():
        if name.startswith(_SIMULATION):
            raise ConfigError(
                f"{name}: {value!r} would reach every server unseen; unset it, and give --simulated-acceptance if meant"
            )
    if settings.simulated_acceptance is None or settings.block_size:
        return
    draft = (
        demo_pair(settings.model).draft if settings.model is not None else Path(str(settings.draft))
    )
    if not draft.is_dir():
        # One of the hub is fetched by its server only; the report says where less was committed than asked for.
        return
    try:
        settings.check_block(DraftConfig.from_pretrained(draft).block_size)
    except UnsupportedDraft:
        # The built-in worker serves it, and reads its block size itself.
        return


def environment(settings: Settings, kind: str) -> dict[str, str]:
    """What the server of an arm finds in its environment beside ours."""
    if settings.simulated_acceptance is None or kind not in BLOCK_KINDS:
        return {}
    return {
        f"{_SIMULATION}LEN": f"{settings.simulated_acceptance:g}",
        f"{_SIMULATION}TOKEN_MODE": "real-draft-token",
    }


def flags(
    settings: Settings, kind: str, accelerator: bool, block_size: int | None = None
) -> tuple[str, ...]:
    """Flags of a server for resolved settings; the user's own come last and win."""
    assert settings.dtype is not None
    if settings.model is not None:
        pair = demo_pair(settings.model)
        target, draft = str(pair.target), str(pair.draft)
        common = server_args(pair, dflash=False)
        if pair.is_hybrid:
            # Twice what is asked at a time: SGLang lets nobody in where few request slots are free.
            requests = 2 * max(settings.levels)
            common += [
                "--max-running-requests",
                str(requests),
                "--max-mamba-cache-size",
                str(6 * requests),
            ]
    else:
        assert settings.target is not None and settings.draft is not None
        target, draft = settings.target, settings.draft
        common = ["--model-path", target, *([] if accelerator else ["--sleep-on-idle"])]
        common += ["--load-format", "dummy"] if settings.random_weights else []
        if settings.servers_at_once > 1:
            # Each would take almost all of the memory for itself.
            common += ["--mem-fraction-static", f"{MEMORY_SHARED / settings.servers_at_once:.3f}"]
    speculation = {
        "ar": [],
        "dflash": ["--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", draft],
        "builtin": [
            "--speculative-algorithm",
            "DFLASH",
            "--speculative-draft-model-path",
            draft,
            "--speculative-dflash-worker",
            "builtin",
        ],
        "ngram": ["--speculative-algorithm", "NGRAM"],
    }[kind]
    if block_size is not None:
        speculation += ["--speculative-num-draft-tokens", str(block_size)]
    # Streaming everything so far with every step would cost the slower arm more than the faster one.
    return (
        *common,
        "--dtype",
        settings.dtype,
        "--incremental-streaming-output",
        *speculation,
        *settings.server_flags,
    )


@contextmanager
def opened(arms: list[Arm], timeout_s: float = 1800) -> Iterator[dict[str, Endpoint]]:
    """The arms' endpoints by name; servers that are started here all run at once, and end with it.

    Raises:
        ServerFailed, RequestFailed: a server does not start, or is not there.
    """
    with ExitStack() as stack:
        servers = {
            arm.name: Server(arm.flags, env=arm.env, timeout_s=timeout_s)
            for arm in arms
            if arm.url is None
        }
        stack.enter_context(together(servers.values()))
        yield {
            arm.name: SGLang(servers[arm.name].url) if arm.url is None else endpoint(arm.url)
            for arm in arms
        }
