"""How the drafter is asked to run (`Options`), and what that comes to for one draft checkpoint
(`ResolvedOptions`). No torch here: flags and pre-flight read it."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_dflash.facts.draft_config import DraftConfig
from sglang_dflash.facts.errors import ConfigError, shown

# Entries of a bounded draft KV cache over what the running requests can see. The cache overwrites
# the oldest entries that no running request reads, so requests that come and go need spare ones.
# 2.0 by measurement: experiments/results/draft_kv_headroom.json.
DRAFT_KV_HEADROOM = 2

# Flags of the server. Commands of ours have shorter names for them.
BLOCK_FLAG = "--speculative-num-draft-tokens"
WINDOW_FLAG = "--speculative-draft-window-size"
SINK_FLAG = "--speculative-draft-sink-size"
_ENTRIES_FLAG = "--speculative-dflash-draft-kv-tokens"
_TAIL_FLAG = "--speculative-dflash-recompute-tail"

# Positions and cache entries are 32-bit.
_MOST_TOKENS = 2**31 - 1
# Blocks above the trained size are served with a warning up to this multiple of it. Acceptance ends
# near the trained size: beyond it a step only verifies more.
_MOST_TRAINED_BLOCKS = 16

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

    def warnings(self, config: DraftConfig, context: int | None) -> list[str]:
        """Sizes that are served and hardly meant, a line each.

        Args:
            context: tokens of a request, at most; None if unknown.
        """
        found, window = [], self.context_window
        if self.block_size > config.block_size:
            found.append(
                f"{BLOCK_FLAG}: {self.block_size} is more than the {config.block_size} of a block "
                "that the draft was trained with: outputs stay exact, and the tokens beyond are "
                "hardly ever accepted"
            )
        for flag, tokens in (
            (WINDOW_FLAG, window.tokens if window else 0),
            (SINK_FLAG, window.sinks if window else 0),
        ):
            if context is not None and tokens >= context:
                found.append(
                    f"{flag}: {tokens} is the whole of a context of {context} tokens: drafts read "
                    "everything, as without a window"
                )
        trained = config.max_position_embeddings
        if context is not None and context > trained:
            found.append(
                f"the target serves contexts of {context} tokens, the draft was made for {trained} "
                "(max_position_embeddings): beyond that outputs stay exact and acceptance may fall"
            )
        return found


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
        for flag, value, least, wrong in (
            (BLOCK_FLAG, self.block_size, 2, " is too small; a block has at least 2 tokens"),
            (SINK_FLAG, self.sinks, 0, " is negative; give 0 or more tokens"),
            (WINDOW_FLAG, self.window, 1, " sees nothing; give at least the block size"),
            (_ENTRIES_FLAG, self.draft_kv_tokens, 1, "; a positive number of tokens is required"),
            (_TAIL_FLAG, self.recompute_tail, 0, " is negative; give 0 or more tokens"),
        ):
            if value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool):
                raise ConfigError(f"{flag}: {shown(value)}; a number of tokens is required")
            if value < least:
                raise ConfigError(f"{flag}: {value}{wrong}")
        of_a_window = (
            (SINK_FLAG, self.sinks),
            (_ENTRIES_FLAG, self.draft_kv_tokens),
            (_TAIL_FLAG, self.recompute_tail),
        )
        for flag, value in ((WINDOW_FLAG, self.window), *of_a_window):
            if value is not None and value > _MOST_TOKENS:
                raise ConfigError(
                    f"{flag}: {shown(value)} is too large; give at most {_MOST_TOKENS} tokens"
                )
        if self.window is None:
            for flag, value in of_a_window:
                if value:
                    raise ConfigError(
                        f"{flag}: {value} has no effect without a window; give {WINDOW_FLAG} too, "
                        "or leave it out"
                    )
        if self.recurrent_rollback not in RECURRENT_ROLLBACKS:
            raise ConfigError(
                f"--speculative-dflash-recurrent-rollback: {shown(self.recurrent_rollback)}; "
                f"choose one of {', '.join(RECURRENT_ROLLBACKS)}"
            )

    def resolve(self, config: DraftConfig) -> ResolvedOptions:
        """Fill in what the checkpoint decides. Raises ConfigError if the two do not fit."""
        return self.for_trained_block(config.block_size)

    def for_trained_block(self, trained: int) -> ResolvedOptions:
        """Fill in the block size that the draft was trained with, if none was asked for.

        Raises:
            ConfigError: the block size is far above that one, or above the window.
        """
        block_size = trained if self.block_size is None else self.block_size
        most = _MOST_TRAINED_BLOCKS * trained
        if block_size > most:
            raise ConfigError(
                f"{BLOCK_FLAG}: {block_size} is more than {_MOST_TRAINED_BLOCKS} times the block "
                f"size that the draft was trained with ({trained}); give at most {most}"
            )
        return self.with_block_size(block_size)

    def check_room(
        self, resolved: ResolvedOptions, *, context: int | None, kv_tokens: int | None
    ) -> None:
        """Whether requests of `resolved`, which is of these options, can be decoded.

        A verify step reserves two blocks for each request (SGLang's
        `get_alloc_reserve_per_decode`). Two requests at a time must find room, or they would be
        retracted in turns.

        Args:
            context: tokens of a request, at most; None if unknown.
            kv_tokens: of the target's KV pool; None if unknown.

        Raises:
            ConfigError: the block is too large.
        """
        name = "block_size" if self.block_size is None else BLOCK_FLAG
        if context is not None and 2 * resolved.block_size > context:
            raise ConfigError(
                f"{name}: {resolved.block_size} is more than half of the target's context of "
                f"{context} tokens; {_at_most(context // 2)} a context of at least "
                f"{2 * resolved.block_size} tokens"
            )
        if kv_tokens is not None and 4 * resolved.block_size > kv_tokens:
            raise ConfigError(
                f"{name}: {resolved.block_size} is too large for a KV pool of {kv_tokens} tokens, "
                f"in which every request reserves two blocks; {_at_most(kv_tokens // 4)} a pool "
                f"of at least {4 * resolved.block_size} tokens"
            )

    def with_block_size(self, block_size: int) -> ResolvedOptions:
        """Fill in the block size. Raises ConfigError if the window is smaller than a block."""
        window = None
        if self.window is not None:
            if self.window < block_size:
                raise ConfigError(
                    f"{WINDOW_FLAG}: {self.window} is smaller than the block "
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


def _at_most(block_size: int) -> str:
    return f"give at most {block_size}, or" if block_size >= 2 else "give"
