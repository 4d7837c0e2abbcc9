"""How the drafter is asked to run."""

from __future__ import annotations

from dataclasses import dataclass, replace

from sglang_dflash.checkpoint.draft_config import DraftConfig
from sglang_dflash.checkpoint.errors import ConfigError

# Entries are overwritten oldest first, whoever they belong to: room for the requests that come and go meanwhile.
DRAFT_KV_HEADROOM = 2

RECURRENT_ROLLBACKS = ("auto", "replay", "snapshot")


@dataclass(frozen=True)
class Options:
    """The run-time knobs of the drafter; every default lives here.

    `block_size`: tokens verified per step, the bonus token included (None: the checkpoint's).
    `window`: committed tokens that the draft's attention reads (None: all of them).
    `sinks`: first tokens of a request that stay visible beside the window.
    `draft_kv_tokens`: entries of the draft KV cache under a window (None: from what the running requests can see).
    `recurrent_rollback`: how recurrent layers of the target follow an accepted prefix (auto: replay where their kind allows it).
    `recompute_tail`: cached prompt tokens whose draft K/V is lost that the target computes again, at most, per request.
    """

    block_size: int | None = None
    window: int | None = None
    sinks: int = 0
    draft_kv_tokens: int | None = None
    recompute_tail: int = 0
    recurrent_rollback: str = "auto"

    def __post_init__(self) -> None:
        if self.block_size is not None and self.block_size < 2:
            raise ConfigError(f"--speculative-num-draft-tokens: {self.block_size} is too small; a block has at least 2 tokens")
        if self.sinks < 0:
            raise ConfigError(f"--speculative-draft-sink-size: {self.sinks} is negative; give 0 or more tokens")
        if self.window is not None and self.window < 1:
            raise ConfigError(f"--speculative-draft-window-size: {self.window} sees nothing; give at least the block size")
        if self.draft_kv_tokens is not None and self.draft_kv_tokens < 1:
            raise ConfigError(f"--speculative-dflash-draft-kv-tokens: {self.draft_kv_tokens}; a positive number of tokens is required")
        if self.recompute_tail < 0:
            raise ConfigError(f"--speculative-dflash-recompute-tail: {self.recompute_tail} is negative; give 0 or more tokens")
        if self.recurrent_rollback not in RECURRENT_ROLLBACKS:
            known = ", ".join(RECURRENT_ROLLBACKS)
            raise ConfigError(f"--speculative-dflash-recurrent-rollback: {self.recurrent_rollback!r}; choose one of {known}")

    def resolve(self, config: DraftConfig) -> Options:
        """Fill in what the checkpoint decides and check the two against each other."""
        block_size = self.block_size or config.block_size
        if self.window is not None and self.window < block_size:
            raise ConfigError(
                f"--speculative-draft-window-size: {self.window} is smaller than the block size {block_size}; give at least {block_size}"
            )
        return replace(self, block_size=block_size, sinks=self.sinks if self.window is not None else 0)

    def visible_tokens(self, requests: int) -> int:
        """Committed tokens that the drafts of that many requests read or are about to commit (window required)."""
        assert self.window is not None and self.block_size is not None
        return requests * (self.window + self.sinks + self.block_size)

    def draft_kv_slots(self, max_running_requests: int) -> int:
        """Entries of a bounded draft KV cache: `DRAFT_KV_HEADROOM` times what that many requests can see (window required)."""
        return self.draft_kv_tokens or int(DRAFT_KV_HEADROOM * self.visible_tokens(max_running_requests))
