"""Our flags, the aliases of the published commands, and their way into the scheduler process."""

from __future__ import annotations

import argparse
import logging
import os
from dataclasses import dataclass, field, fields
from typing import Any

from sglang_dflash.drafting.options import RECURRENT_ROLLBACKS, Options
from sglang_dflash.facts.errors import ConfigError, shown
from sglang_dflash.repairs import flag as guard
from sglang_dflash.serving.start.refusal import use_one_line

logger = logging.getLogger(__name__)

PREFIX = "speculative_dflash_"
BLOCK_FLAG = "--speculative-num-draft-tokens"
# SGLang's own, of another field.
BLOCK_ALIAS = "--speculative-dflash-block-size"
# The published commands' spelling -> SGLang 0.5.23's field.
ALIASES = {
    "speculative_dflash_draft_window_size": "speculative_draft_window_size",
    "mamba_scheduler_strategy": "mamba_radix_cache_strategy",
}
# The published commands export these; SGLang 0.5.23 knows neither. It still reads the two others
# that they export: SGLANG_ENABLE_OVERLAP_PLAN_STREAM, SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN.
RETIRED_VARIABLES = ("SGLANG_ENABLE_SPEC_V2", "SGLANG_ENABLE_DFLASH_SPEC_V2")


def _flag(default: Any, help: str, **others: Any) -> Any:
    """A row of the table; `others` are `add_argument`'s."""
    return field(default=default, metadata={"help": help, **others})


@dataclass(frozen=True)
class ServerFlags:
    """Our flags as they were given. `--speculative-dflash-` stands before each name."""

    worker: str = _flag(
        "auto",
        "Which DFLASH worker serves: 'auto' takes that of sglang-dflash if it can serve the pair, "
        "'builtin' takes SGLang's own.",
        choices=("auto", "builtin"),
    )
    draft_kv_tokens: int | None = _flag(
        None,
        "Entries of the draft KV cache under a draft window. Default: twice what the running "
        "requests can see.",
        type=int,
    )
    recompute_tail: int = _flag(
        Options.recompute_tail,
        "Cached prompt tokens, at most, that the target computes again if the bounded draft KV "
        f"cache has lost them. Default: {Options.recompute_tail}.",
        type=int,
    )
    recurrent_rollback: str = _flag(
        Options.recurrent_rollback,
        "How recurrent layers of the target follow an accepted prefix: 'snapshot' keeps the state "
        "after every drafted token, 'replay' keeps their inputs and folds the accepted ones in. "
        "Default: auto, replay for Gated DeltaNet layers.",
        choices=RECURRENT_ROLLBACKS,
    )
    draft_graphs: str = _flag(
        "auto",
        "'auto' captures the drafter's steps in CUDA graphs if the target's are captured, 'off' "
        "does not. Default: auto.",
        choices=("auto", "off"),
    )
    self_check: str = _flag(
        "on",
        "Whether kernels and graphs of the drafter are compared with torch at start-up: a few "
        "milliseconds, and a server that does not start if one is wrong. Default: on.",
        choices=("on", "off"),
    )
    width: str = _flag(
        "fixed",
        "How many tokens of a block the target verifies: 'fixed' is all of them in every step, "
        "'adaptive' is as many as pay off, down to 1, plain decoding. 'auto' is adaptive on a CPU "
        "and fixed elsewhere. Default: fixed.",
        choices=("auto", "adaptive", "fixed"),
    )
    widths: str | None = _flag(
        None,
        "Widths that an adaptive server may choose. Default: 1,4,8 and the block size.",
        metavar="1,...,BLOCK_SIZE",
    )
    request_guard: str = _flag(
        "on",
        "Whether requests that would end the server are refused with HTTP 400, under any "
        "--speculative-algorithm and without one. Default: on.",
        choices=guard.CHOICES,
    )
    extension: str | None = _flag(
        None,
        "For experiments: a function that supplies another drafter or watches every step "
        "(sglang_dflash.serving.step.extension).",
        metavar="MODULE:FUNCTION",
    )

    @classmethod
    def of(cls, server_args: Any) -> ServerFlags:
        """Those of SGLang's arguments."""
        given = _given(server_args)
        named = {each.name: PREFIX + each.name for each in fields(cls)}
        return cls(**{name: given[long] for name, long in named.items() if long in given})

    def listed_widths(self) -> tuple[int, ...] | None:
        """The numbers of --speculative-dflash-widths; None if it was not given.

        Raises:
            ConfigError: it is no list of numbers.
        """
        if self.widths is None:
            return None
        try:
            return tuple(int(number) for number in self.widths.split(","))
        except (AttributeError, ValueError):
            raise ConfigError(
                _typed(PREFIX + "widths"),
                self.widths,
                "numbers separated by commas are required, such as 1,4,8,16",
            ) from None


# Keyword arguments of `sglang.Engine` that are ours.
NAMES = (*(PREFIX + each.name for each in fields(ServerFlags)), *ALIASES)


class AliasAction(argparse.Action):
    """Stores the value under SGLang's field, and under the alias to tell that it was typed.

    Another value of the field that was typed before is an error of the command line. One that is
    typed later is found by `keep_flags`.
    """

    def __init__(self, *args: Any, alias: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.alias = alias

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        before = getattr(namespace, self.dest, None)
        is_typed = before not in (
            parser.get_default(self.dest),
            getattr(namespace, self.alias, None),
        )
        if is_typed and before != values:
            conflict = _conflict(self.alias, values, before)
            raise argparse.ArgumentError(self, f"{shown(values)}; {conflict.required}")
        setattr(namespace, self.dest, values)
        setattr(namespace, self.alias, values)


def _typed(name: str) -> str:
    return "--" + name.replace("_", "-")


def _conflict(alias: str, value: Any, other: Any) -> ConfigError:
    of = _typed(ALIASES[alias])
    return ConfigError(
        _typed(alias),
        value,
        f"but {of}, of which it is an alias, is {shown(other)}; give one of them",
    )


def add_flags(_result: None, parser: argparse.ArgumentParser) -> None:
    """After `ServerArgs.add_cli_args`: our flags, and aliases of SGLang's."""
    group = parser.add_argument_group("sglang-dflash")
    for row in fields(ServerFlags):
        group.add_argument(_typed(PREFIX + row.name), default=argparse.SUPPRESS, **row.metadata)
    for alias, field_name in ALIASES.items():
        of = _action(parser, field_name)
        like: dict[str, Any] = {} if of is None else {"type": of.type, "choices": of.choices}
        group.add_argument(
            _typed(alias),
            dest=field_name,
            alias=alias,
            action=AliasAction,
            default=argparse.SUPPRESS,
            help=f"Alias of {_typed(field_name)}.",
            **like,
        )


def _action(parser: argparse.ArgumentParser, name: str) -> argparse.Action | None:
    """SGLang's flag of that field, if it has one."""
    return next((action for action in parser._actions if action.dest == name), None)


def keep_flags(server_args: Any, _cls: type, namespace: argparse.Namespace) -> Any:
    """After `ServerArgs.from_cli_args`: keep the values of our flags with SGLang's.

    Raises:
        ConfigError: a flag and its alias were given different values.
    """
    use_one_line()
    given = {name: getattr(namespace, name) for name in NAMES if hasattr(namespace, name)}
    return _attach(server_args, given)


def server_args_from_kwargs(**kwargs: Any) -> Any:
    """For `sglang.Engine(**kwargs)`: SGLang's arguments, ours attached and aliases resolved."""
    from sglang.srt.server_args import ServerArgs

    given = {name: kwargs.pop(name) for name in NAMES if name in kwargs}
    for alias, of in ALIASES.items():
        if alias in given:
            # Keyword arguments pass no parser.
            parser = argparse.ArgumentParser()
            ServerArgs.add_cli_args(parser)
            action = _action(parser, of)
            _check_choice(_typed(alias), given[alias], None if action is None else action.choices)
            kwargs.setdefault(of, given[alias])
    return _attach(ServerArgs(**kwargs), given)


def _check_choice(flag: str, value: Any, choices: Any) -> None:
    if choices is not None and value not in choices:
        raise ConfigError(flag, value, f"choose one of {', '.join(choices)}")


def _attach(server_args: Any, given: dict[str, Any]) -> Any:
    for row in fields(ServerFlags):
        name = PREFIX + row.name
        _check_choice(_typed(name), given.get(name, row.default), row.metadata.get("choices"))
    for alias, of in ALIASES.items():
        value = getattr(server_args, of)
        if alias in given and given[alias] != value:
            raise _conflict(alias, given[alias], value)
    setattr(server_args, guard.ATTRIBUTE, given)
    return server_args


def warn_retired_env() -> None:
    """Log one line on variables of the published commands that are set and have no effect."""
    found = [name for name in RETIRED_VARIABLES if name in os.environ]
    if found:
        logger.warning(
            "%s: SGLang no longer reads this. What it switched on is the default: speculative "
            "steps overlap with scheduling unless --disable-overlap-schedule is given",
            ", ".join(found),
        )


def warn_unguarded(server_args: Any, tokenizer_workers: int) -> None:
    """Log one line if requests are tokenized where the request guard does not run."""
    if tokenizer_workers > 1 and not guard.guard_off(server_args):
        logger.warning(
            "--tokenizer-worker-num %d: SGLang loads no plugins in tokenizer workers, so the "
            "request guard does not run, and a bad request may end the server; 1 guards it",
            tokenizer_workers,
        )


def options(server_args: Any, resolved: Any) -> Options:
    """`Options` from SGLang's resolved fields and ours. Raises ConfigError."""
    ours = ServerFlags.of(server_args)
    block, alias = resolved.speculative_num_draft_tokens, resolved.speculative_dflash_block_size
    if alias is not None and block not in (None, alias):
        raise ConfigError(
            BLOCK_ALIAS, alias, f"but {BLOCK_FLAG} is {shown(block)}; give one of them"
        )
    return Options(
        block_size=alias if block is None else block,
        window=resolved.speculative_draft_window_size,
        sinks=resolved.speculative_draft_sink_size or 0,
        draft_kv_tokens=ours.draft_kv_tokens,
        recompute_tail=ours.recompute_tail,
        recurrent_rollback=ours.recurrent_rollback,
    )


def names(server_args: Any) -> dict[str, str]:
    """What the user typed, or would type, for each setting that an error may name."""
    window, block = "speculative_dflash_draft_window_size", server_args.speculative_num_draft_tokens
    is_alias = block is None and server_args.speculative_dflash_block_size is not None
    return {
        **{each.name: _typed(PREFIX + each.name) for each in fields(ServerFlags)},
        "block_size": BLOCK_ALIAS if is_alias else BLOCK_FLAG,
        "window": _typed(window if window in _given(server_args) else ALIASES[window]),
        "sinks": "--speculative-draft-sink-size",
        "attention": "--speculative-draft-attention-backend",
        "tp_size": "--tp-size",
    }


def _given(server_args: Any) -> dict[str, Any]:
    return getattr(server_args, guard.ATTRIBUTE, {})
