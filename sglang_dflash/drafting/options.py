"""The drafter's options as given (`Options`), and resolved for one draft checkpoint
(`ResolvedOptions`). No torch here: flags and pre-flight read it."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from sglang_dflash.checkpoint.draft_config import DraftConfig, Reach
from sglang_dflash.checkpoint.fields import is_int
from sglang_dflash.common.command_line import setting
from sglang_dflash.common.errors import ConfigError, cut

# Requests that a ring has entries for beside those that run: the entries of one that has just ended
# are free only after the next step (docs/how-it-works.md).
SPARE_REQUESTS = 1

# Positions and cache entries are 32-bit.
_MOST_TOKENS = 2**31 - 1
# Blocks above the trained size are served with a warning up to this multiple of it. Acceptance ends
# near the trained size: beyond it a step only verifies more.
_MOST_TRAINED_BLOCKS = 16

# Widths that an adaptive server chooses from, beside the draft's block and the whole one.
NARROW_WIDTHS = (1, 4, 8)
# Plain steps whose hidden states wait to be absorbed, at most.
MOST_WAITING_STEPS = 16
# Tokens that the drafter projects to K/V at a time, at most: a prompt takes several projections.
MOST_PROJECTED = 512


def asks_dflash(algorithm: str | None) -> bool:
    """Return whether a value of --speculative-algorithm is DFLASH."""
    return algorithm is not None and algorithm.upper() == "DFLASH"


class Finding(NamedTuple):
    """A setting that is accepted but probably a mistake, or a problem of a running server.

    Attributes:
        name: does not change between versions.
        problem: the setting and its value, or what is wrong.
        advice: what to do.
    """

    name: str
    problem: str
    advice: str

    def __str__(self) -> str:
        return f"{self.problem}; {self.advice}"


@dataclass(frozen=True)
class ResolvedOptions:
    """Options for one draft checkpoint, all decided.

    Attributes:
        verify_block: tokens verified per step, the bonus token included; at most, if widths adapt.
        draft_block: tokens of the block that the draft fills, the bonus token included. Lookup
            fills the rest.
        block_from: what `verify_block` was taken from, as errors name it.
        reach: what the server lets drafts read of a request.
        looks_up, draft_kv_tokens, recurrent_rollback: as in `Options`.
        context: tokens of a request, at most; None if that is not known.
    """

    verify_block: int
    draft_block: int
    block_from: str
    reach: Reach
    looks_up: bool
    draft_kv_tokens: int | None
    recurrent_rollback: str
    context: int | None = None

    def ring_entries(self, reach: Reach, carried: int) -> int | None:
        """Entries of the ring for the layers of that reach and so many requests at a time; None if
        they read the whole context.

        By default what the requests and `SPARE_REQUESTS` more can see or are about to commit.
        """
        if not reach.is_bounded:
            return None
        if self.draft_kv_tokens is not None:
            return self.draft_kv_tokens
        visible = reach.tokens_read(sys.maxsize if self.context is None else self.context)
        return (carried + SPARE_REQUESTS) * (visible + self.verify_block)

    def adaptive_widths(self) -> tuple[int, ...]:
        """Verify widths that an adaptive server chooses from, ascending."""
        widths = {*NARROW_WIDTHS, self.draft_block, self.verify_block}
        return tuple(sorted(width for width in widths if width <= self.verify_block))

    def check_room(self, kv_tokens: int | None) -> None:
        """Check that requests can be decoded.

        A verify step reserves two blocks ahead for each request where the pool has them. The pool
        must have room for two requests at a time.

        Args:
            kv_tokens: of the target's KV pool; None if unknown.

        Raises:
            ConfigError: the block is too large.
        """
        name, block, context = self.block_from, self.verify_block, self.context
        if context is not None and 2 * block > context:
            raise ConfigError(
                name,
                block,
                f"more than half of the target's context of {context} tokens; "
                f"{_at_most(context // 2)} a context of at least {2 * block} tokens",
            )
        if kv_tokens is not None and 4 * block > kv_tokens:
            raise ConfigError(
                name,
                block,
                f"too large for a KV pool of {kv_tokens} tokens, in which every request reserves "
                f"two blocks; {_at_most(kv_tokens // 4)} a pool of at least {4 * block} tokens",
            )

    def warnings(
        self, config: DraftConfig, names: Mapping[str, str], is_fixed: bool = False
    ) -> list[Finding]:
        """Return findings about settings with which outputs stay exact and acceptance may fall.

        Args:
            names: setting -> what the user types for it.
            is_fixed: whether every step verifies the whole block.
        """
        warnings, context = _of_checkpoint(config), self.context
        trained = config.max_position_embeddings
        name = names.get("verify_block", "verify_block")
        if self.draft_block > config.block_size:
            warnings.append(
                Finding(
                    "block-above-trained",
                    f"{name}: {self.verify_block} is more than the "
                    f"{config.block_size} of a block that the draft was trained with: steps take "
                    "longer, for they compute the whole block, and acceptance may fall",
                    f"give {config.block_size}, or leave it out",
                )
            )
        if is_fixed and self.verify_block > self.draft_block:
            warnings.append(
                Finding(
                    "lookup-block-fixed",
                    f"{name}: {self.verify_block} is more than the "
                    f"{self.draft_block} of a block that the draft fills, and every step verifies "
                    "the whole block, also where nothing is copied",
                    f"set {names.get('width', 'the width')} to adaptive",
                )
            )
        for name, tokens in (("window", self.reach.tokens), ("sinks", self.reach.sinks)):
            if context is not None and tokens is not None and tokens >= context:
                warnings.append(
                    Finding(
                        f"{name}-above-context",
                        f"{names.get(name, name)}: {tokens} is the whole of a context of {context} "
                        "tokens: drafts read everything, as without a window",
                        "give less, or leave it out",
                    )
                )
        if context is not None and context > trained:
            warnings.append(
                Finding(
                    "long-contexts",
                    f"the target serves contexts of {context} tokens, the draft was made for "
                    f"{trained} (max_position_embeddings): beyond that acceptance may fall",
                    f"set --context-length {trained} if requests are shorter, or "
                    f"{names.get('window', 'a draft window')} if they are not",
                )
            )
        return warnings


@dataclass(frozen=True)
class Options:
    """The drafter's options as given.

    Attributes:
        verify_block: tokens verified per step, the bonus token included; None for the checkpoint's.
            The draft fills them all, or with lookup no more than it was trained with.
        looks_up: whether drafts are also looked up in the request's own text.
        window: committed tokens that the draft's attention reads; None for all.
        sinks: first tokens of a request that stay visible beside the window.
        draft_kv_tokens: entries of the draft KV cache of layers that do not read the whole context;
            None for the default.
        recurrent_rollback: how the target's recurrent layers follow an accepted prefix: `replay`,
            `snapshot`, or `auto`, which is replay where the kind of layer allows it.

    Raises:
        ConfigError: a value is out of range.
    """

    verify_block: int | None = setting(None, "tokens verified per step (default: the draft's)")
    looks_up: bool = setting(False, "drafts are also looked up in the request's own text")
    window: int | None = setting(None, "committed tokens that the draft attends to (default: all)")
    sinks: int = setting(0, "first tokens of a request that stay visible beside the window")
    draft_kv_tokens: int | None = setting(None, "entries of each ring of draft KV")
    recurrent_rollback: str = "auto"

    def __post_init__(self) -> None:
        bounds = {"verify_block": 2, "window": 1, "sinks": 0, "draft_kv_tokens": 1}
        for name, least in bounds.items():
            value = getattr(self, name)
            if value is None:
                continue
            if not is_int(value) or not least <= value <= _MOST_TOKENS:
                raise ConfigError(
                    name, value, f"a number of tokens from {least} to {_MOST_TOKENS} is required"
                )
        if self.window is None and self.sinks:
            raise ConfigError(
                "sinks",
                self.sinks,
                "this has no effect without a window; give {window} too, or leave it out",
            )

    def resolve(self, config: DraftConfig) -> ResolvedOptions:
        """Fill in what the checkpoint decides. Raises ConfigError if the two do not fit."""
        resolved = self.for_trained_block(config.block_size)
        bounded = any(group.reach.is_bounded for group in config.groups(resolved.reach))
        if self.draft_kv_tokens is not None and not bounded:
            raise ConfigError(
                "draft_kv_tokens",
                self.draft_kv_tokens,
                "this has no effect on a draft whose layers all read the whole context; give "
                "{window} too, or leave it out",
            )
        return resolved

    def for_trained_block(self, trained: int | None) -> ResolvedOptions:
        """Fill in the block that the draft was trained with, if none was asked for.

        Args:
            trained: None if it is not known.

        Raises:
            ConfigError: that block is far above the trained one, above the window, or not known.
        """
        verify_block = trained if self.verify_block is None else self.verify_block
        if verify_block is None:
            required = "required, because the draft's is not known"
            raise ConfigError("verify_block", required=required)
        most = _MOST_TRAINED_BLOCKS * (trained or verify_block)
        if verify_block > most:
            raise ConfigError(
                "verify_block",
                verify_block,
                f"more than {_MOST_TRAINED_BLOCKS} times the block size that the draft was trained "
                f"with ({trained}); give at most {most}",
            )
        if self.window is not None and self.window < verify_block:
            raise ConfigError(
                "window", self.window, f"smaller than the block size; give at least {verify_block}"
            )
        draft_block = min(verify_block, trained or verify_block) if self.looks_up else verify_block
        return ResolvedOptions(
            verify_block=verify_block,
            draft_block=draft_block,
            block_from="block_size of the draft" if self.verify_block is None else "verify_block",
            reach=Reach(self.window, self.sinks),
            looks_up=self.looks_up,
            draft_kv_tokens=self.draft_kv_tokens,
            recurrent_rollback=self.recurrent_rollback,
        )


def _of_checkpoint(config: DraftConfig) -> list[Finding]:
    """Return findings about the checkpoint itself: outputs stay exact, acceptance may fall."""
    warnings = []
    if not config.names_target_layers:
        ids = list(config.target_layer_ids)
        warnings.append(
            Finding(
                "target-layers-not-named",
                f"target_layer_ids of the draft: missing; the default, {ids}, is taken: if it was "
                "trained with other layers of the target, acceptance falls",
                "add the layers that it was trained with to dflash_config in its config.json",
            )
        )
    if config.unknown_keys:
        warnings.append(
            Finding(
                "unknown-keys",
                f"{cut(', '.join(config.unknown_keys))} in the draft's config.json: not known "
                "here, and without effect: if the draft was trained with it, acceptance falls",
                "if few drafts are accepted, serve with --speculative-dflash-worker builtin",
            )
        )
    return warnings


def _at_most(tokens: int) -> str:
    return f"give at most {tokens}, or" if tokens >= 2 else "give"
