"""What is compared: ways of decoding, each behind a server that is started here or runs already."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from sglang_dflash.bench.demo import server_args
from sglang_dflash.bench.demo_models import demo_pair
from sglang_dflash.bench.load import Endpoint, SGLang, endpoint
from sglang_dflash.bench.server import Server, together
from sglang_dflash.bench.settings import Settings
from sglang_dflash.config import ConfigError

# Kinds whose block is the user's to choose.
_BLOCKS = ("dflash", "builtin")


@dataclass(frozen=True)
class Arm:
    """`flags` of the server to start, or the `url` of a running one."""

    name: str
    flags: tuple[str, ...] = ()
    url: str | None = None


def arms_of(settings: Settings, accelerator: bool) -> list[Arm]:
    """The arms of resolved settings, in the order asked for; the first is what the others are compared with.

    Raises:
        ConfigError: an arm cannot be served on this machine.
    """
    if settings.base_url:
        return [Arm(name, url=url) for name, _, url in (one.partition("=") for one in settings.base_url)]
    if "ngram" in settings.arm and not accelerator:
        raise ConfigError("--arm: 'ngram' needs SGLang's compiled kernels, which load on an accelerator only; leave it out here")
    arms = []
    for kind in settings.arm:
        sizes = settings.block_size if kind in _BLOCKS else ()
        arms += [Arm(f"{kind}@{size}", flags(settings, kind, accelerator, size)) for size in sizes] or [
            Arm(kind, flags(settings, kind, accelerator))
        ]
    return arms


def flags(settings: Settings, kind: str, accelerator: bool, block_size: int | None = None) -> tuple[str, ...]:
    """Flags of a server for resolved settings; the user's own come last and win."""
    assert settings.dtype is not None
    if settings.model is not None:
        pair = demo_pair(settings.model)
        target, draft = str(pair.target), str(pair.draft)
        common = server_args(pair, dflash=False)
        if pair.is_hybrid:
            # Twice what is asked at a time: SGLang lets nobody in where few request slots are free.
            requests = 2 * max(settings.levels)
            common += ["--max-running-requests", str(requests), "--max-mamba-cache-size", str(6 * requests)]
    else:
        assert settings.target is not None and settings.draft is not None
        target, draft = settings.target, settings.draft
        common = ["--model-path", target, *([] if accelerator else ["--sleep-on-idle"])]
    speculation = {
        "ar": [],
        "dflash": ["--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", draft],
        "builtin": ["--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", draft, "--speculative-dflash-worker", "builtin"],
        "ngram": ["--speculative-algorithm", "NGRAM"],
    }[kind]
    if block_size is not None:
        speculation += ["--speculative-num-draft-tokens", str(block_size)]
    # Streaming everything so far with every step would cost the slower arm more than the faster one.
    return (*common, "--dtype", settings.dtype, "--incremental-streaming-output", *speculation, *settings.server_flags)


@contextmanager
def opened(arms: list[Arm], timeout_s: float = 1800) -> Iterator[dict[str, Endpoint]]:
    """The arms' endpoints by name; servers that are started here all run at once, and end with it.

    Raises:
        ServerFailed, RequestFailed: a server does not start, or is not there.
    """
    with ExitStack() as stack:
        servers = {arm.name: Server(arm.flags, timeout_s=timeout_s) for arm in arms if arm.url is None}
        stack.enter_context(together(servers.values()))
        yield {arm.name: SGLang(servers[arm.name].url) if arm.url is None else endpoint(arm.url) for arm in arms}
