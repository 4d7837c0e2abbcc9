"""How the drafter is asked to run (`Options`), and what that comes to for one draft checkpoint
(`ResolvedOptions`). No torch here: flags and pre-flight read it."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_dflash.checkpoint.draft_config import DraftConfig
from sglang_dflash.checkpoint.errors import ConfigError

# Entries of a bounded draft KV cache over what the running requests can see. The cache overwrites
# the oldest entries that no running request reads, so requests that come and go need spare ones.
# 2.0 by measurement: benchmarks/results/draft_kv_headroom.json.
DRAFT_KV_HEADROOM = 2

RECURRENT_ROLLBACKS = ("auto", "replay", "snapshot")


@dataclass(frozen=True)
class ContextWindow:
    """The committed tokens that a request's drafts read: the first `sinks`, the last `tokens`."""

    tokens: int
    sinks: int

    @property
    def size(self) -> int:
        """Tokens that a long request sees."""
        return self.tokens + self.sinks


@dataclass(frozen=True)
class ResolvedOptions:
    """Options for one draft checkpoint, all decided.

    Attributes:
        block_size: tokens verified per step, the bonus token included.
        context_window: what the drafts read; None for every committed token.
        draft_kv_tokens: entries of a bounded draft KV cache; None for the default.
        recompute_tail: see `Options`.
        recurrent_rollback: see `Options`.
    """

    block_size: int
    context_window: ContextWindow | None
    draft_kv_tokens: int | None
    recompute_tail: int
    recurrent_rollback: str

    def draft_kv_entries(self, max_running_requests: int) -> int | None:
        """Entries of a bounded draft KV cache for that many requests; None without a window.

        By default `DRAFT_KV_HEADROOM` times what the requests can see or are about to commit.
        """
        if self.context_window is None:
            return None
        if self.draft_kv_tokens is not None:
            return self.draft_kv_tokens
        visible = max_running_requests * (self.context_window.size + self.block_size)
        return int(DRAFT_KV_HEADROOM * visible)


@dataclass(frozen=True)
class Options:
    """What was asked for. Errors name the server's flags.

    Attributes:
        block_size: tokens verified per step, the bonus token included; None for the checkpoint's.
        window: committed tokens that the draft's attention reads; None for all.
        sinks: first tokens of a request that stay visible beside the window.
        draft_kv_tokens: entries of the draft KV cache under a window; None for the default.
        recompute_tail: cached prompt tokens per request, at most, that the target computes again
            because their draft K/V is lost.
        recurrent_rollback: how the target's recurrent layers follow an accepted prefix, one of
            `RECURRENT_ROLLBACKS`; auto is replay where the kind of layer allows it.

    Raises:
        ConfigError: a value is out of range.
    """

    block_size: int | None = None
    window: int | None = None
    sinks: int = 0
    draft_kv_tokens: int | None = None
    recompute_tail: int = 0
    recurrent_rollback: str = "auto"

    def __post_init__(self) -> None:
        if self.block_size is not None and self.block_size < 2:
            raise ConfigError(
                f"--speculative-num-draft-tokens: {self.block_size} is too small; "
                "a block has at least 2 tokens"
            )
        if self.sinks < 0:
            raise ConfigError(
                f"--speculative-draft-sink-size: {self.sinks} is negative; give 0 or more tokens"
            )
        if self.window is not None and self.window < 1:
            raise ConfigError(
                f"--speculative-draft-window-size: {self.window} sees nothing; "
                "give at least the block size"
            )
        if self.draft_kv_tokens is not None and self.draft_kv_tokens < 1:
            raise ConfigError(
                f"--speculative-dflash-draft-kv-tokens: {self.draft_kv_tokens}; "
                "a positive number of tokens is required"
            )
        if self.recompute_tail < 0:
            raise ConfigError(
                f"--speculative-dflash-recompute-tail: {self.recompute_tail} is negative; "
                "give 0 or more tokens"
            )
        if self.recurrent_rollback not in RECURRENT_ROLLBACKS:
            raise ConfigError(
                f"--speculative-dflash-recurrent-rollback: {self.recurrent_rollback!r}; "
                f"choose one of {', '.join(RECURRENT_ROLLBACKS)}"
            )

    def resolve(self, config: DraftConfig) -> ResolvedOptions:
        """Fill in what the checkpoint decides. Raises ConfigError if the two do not fit."""
        return self.with_block_size(self.block_size or config.block_size)

    def with_block_size(self, block_size: int) -> ResolvedOptions:
        """Fill in the block size. Raises ConfigError if the window is smaller than a block."""
        window = None
        if self.window is not None:
            if self.window < block_size:
                raise ConfigError(
                    f"--speculative-draft-window-size: {self.window} is smaller than the block "
                    f"size {block_size}; give at least {block_size}"
                )
            window = ContextWindow(self.window, self.sinks)
        return ResolvedOptions(
            block_size=block_size,
            context_window=window,
            draft_kv_tokens=self.draft_kv_tokens,
            recompute_tail=self.recompute_tail,
            recurrent_rollback=self.recurrent_rollback,
        )
