"""Our flags, the aliases of the published commands, and their way into the scheduler process."""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Callable
from typing import Any

from sglang_dflash.drafting.options import RECURRENT_ROLLBACKS, Options
from sglang_dflash.facts.errors import ConfigError, shown
from sglang_dflash.repairs import flag as guard
from sglang_dflash.serving.start.refusal import use_one_line

logger = logging.getLogger(__name__)

# The published commands' spelling -> SGLang 0.5.23's field.
ALIASES = {
    "speculative_dflash_draft_window_size": "speculative_draft_window_size",
    "mamba_scheduler_strategy": "mamba_radix_cache_strategy",
}
# The published commands export these; SGLang 0.5.23 knows neither. It still reads the two others
# that they export: SGLANG_ENABLE_OVERLAP_PLAN_STREAM, SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN.
RETIRED_VARIABLES = ("SGLANG_ENABLE_SPEC_V2", "SGLANG_ENABLE_DFLASH_SPEC_V2")
BLOCK_FLAG = "--speculative-num-draft-tokens"
BLOCK_ALIAS = "--speculative-dflash-block-size"  # SGLang's own, of another field.
WORKERS = ("auto", "builtin")
SELF_CHECK = ("on", "off")
DRAFT_GRAPHS = ("auto", "off", "recorded")
WIDTHS = ("auto", "adaptive", "fixed")
CHOICES = {
    "speculative_dflash_worker": WORKERS,
    guard.FIELD: guard.CHOICES,
    "speculative_dflash_draft_graphs": DRAFT_GRAPHS,
    "speculative_dflash_self_check": SELF_CHECK,
    "speculative_dflash_width": WIDTHS,
}
DEFAULTS: dict[str, Any] = {
    "speculative_dflash_worker": "auto",
    "speculative_dflash_draft_kv_tokens": None,
    "speculative_dflash_recompute_tail": Options.recompute_tail,
    "speculative_dflash_recurrent_rollback": Options.recurrent_rollback,
    "speculative_dflash_extension": None,
    guard.FIELD: "on",
    "speculative_dflash_draft_graphs": "auto",
    "speculative_dflash_self_check": "on",
    "speculative_dflash_width": "fixed",
    "speculative_dflash_widths": None,
}


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
            raise argparse.ArgumentError(
                self, f"{shown(values)}, but {_conflict(self.alias, before)}"
            )
        setattr(namespace, self.dest, values)
        setattr(namespace, self.alias, values)


def _flag(field: str) -> str:
    return "--" + field.replace("_", "-")


def _conflict(alias: str, other: Any) -> str:
    return f"{_flag(ALIASES[alias])}, of which it is an alias, is {shown(other)}; give one of them"


def _add_widths(add: Callable[..., None]) -> None:
    add(
        "--speculative-dflash-width",
        choices=WIDTHS,
        help="How many tokens of a block the target verifies: 'fixed' is all of them in every "
        "step, 'adaptive' is as many as pay off, down to 1, plain decoding. 'auto' is adaptive on "
        "a CPU and fixed elsewhere. Default: fixed.",
    )
    add(
        "--speculative-dflash-widths",
        metavar="1,...,BLOCK_SIZE",
        help="Widths that an adaptive server may choose. Default: 1,4,8 and the block size.",
    )


def _add_switches(add: Callable[..., None]) -> None:
    """Flags with a few values each, most of them for when something is wrong."""
    add(
        "--speculative-dflash-draft-graphs",
        choices=DRAFT_GRAPHS,
        help="'auto' captures the drafter's steps in CUDA graphs if the target's are captured, "
        "'off' does not. 'recorded' replays lists of torch operations instead, on a CPU: the same "
        "path, for tests. Default: auto.",
    )
    add(
        "--speculative-dflash-self-check",
        choices=SELF_CHECK,
        help="Whether kernels and graphs of the drafter are compared with torch at start-up: a few "
        "milliseconds, and a server that does not start if one is wrong. Default: on.",
    )
    add(
        "--speculative-dflash-request-guard",
        choices=guard.CHOICES,
        help="Whether requests that would end the server are refused with HTTP 400, under any "
        "--speculative-algorithm and without one. Default: on.",
    )


def add_flags(_result: None, parser: argparse.ArgumentParser) -> None:
    """After `ServerArgs.add_cli_args`: our flags, and aliases of SGLang's."""
    group = parser.add_argument_group("sglang-dflash")

    def add(flag: str, **others: Any) -> None:
        group.add_argument(flag, default=argparse.SUPPRESS, **others)

    def add_alias(alias: str, **others: Any) -> None:
        others |= {"dest": ALIASES[alias], "action": AliasAction, "alias": alias}
        add(_flag(alias), **others)

    add(
        "--speculative-dflash-worker",
        choices=WORKERS,
        help="Which DFLASH worker serves: 'auto' takes that of sglang-dflash if it can serve the "
        "pair, 'builtin' takes SGLang's own.",
    )
    add(
        "--speculative-dflash-draft-kv-tokens",
        type=int,
        help="Entries of the draft KV cache under a draft window. Default: twice what the running "
        "requests can see.",
    )
    add(
        "--speculative-dflash-recompute-tail",
        type=int,
        help="Cached prompt tokens, at most, that the target computes again if the bounded draft "
        f"KV cache has lost them. Default: {Options.recompute_tail}.",
    )
    add(
        "--speculative-dflash-recurrent-rollback",
        choices=RECURRENT_ROLLBACKS,
        help="How recurrent layers of the target follow an accepted prefix: 'snapshot' keeps the "
        "state after every drafted token, 'replay' keeps their inputs and folds the accepted ones "
        "in. Default: auto, replay for Gated DeltaNet layers.",
    )
    add(
        "--speculative-dflash-extension",
        metavar="MODULE:FUNCTION",
        help="For experiments: a function that supplies another drafter or watches every step "
        "(sglang_dflash.serving.step.extension).",
    )
    _add_widths(add)
    _add_switches(add)
    add_alias(
        "speculative_dflash_draft_window_size",
        type=int,
        help="Alias of --speculative-draft-window-size: committed tokens that the draft attends "
        "to.",
    )
    add_alias(
        "mamba_scheduler_strategy",
        choices=_choices(parser, ALIASES["mamba_scheduler_strategy"]),
        help="Alias of --mamba-radix-cache-strategy.",
    )


def _choices(parser: argparse.ArgumentParser, field: str) -> list[str] | None:
    """The values that SGLang's flag of that field takes; None for any, or without such a flag."""
    actions = (action for action in parser._actions if action.dest == field)
    found = next((action.choices for action in actions if action.choices), None)
    return None if found is None else list(found)


def _check_choice(alias: str, value: Any, server_args_class: Any) -> None:
    """Raise ConfigError unless SGLang's flag takes the value. Keyword arguments pass no parser."""
    parser = argparse.ArgumentParser()
    server_args_class.add_cli_args(parser)
    choices = _choices(parser, ALIASES[alias])
    if choices is not None and value not in choices:
        raise ConfigError(_flag(alias), value, f"choose one of {', '.join(choices)}")


def keep_flags(server_args: Any, _cls: type, namespace: argparse.Namespace) -> Any:
    """After `ServerArgs.from_cli_args`: keep the values of our flags with SGLang's.

    Raises:
        ConfigError: a flag and its alias were given different values.
    """
    use_one_line()
    names = (*DEFAULTS, *ALIASES)
    given = {name: getattr(namespace, name) for name in names if hasattr(namespace, name)}
    return _attach(server_args, given)


def server_args_from_kwargs(**kwargs: Any) -> Any:
    """For `sglang.Engine(**kwargs)`: SGLang's arguments, ours attached and aliases resolved."""
    from sglang.srt.server_args import ServerArgs

    given = {name: kwargs.pop(name) for name in (*DEFAULTS, *ALIASES) if name in kwargs}
    for alias, field in ALIASES.items():
        if alias in given:
            _check_choice(alias, given[alias], ServerArgs)
            kwargs.setdefault(field, given[alias])
    return _attach(ServerArgs(**kwargs), given)


def _attach(server_args: Any, given: dict[str, Any]) -> Any:
    for name, choices in CHOICES.items():
        value = given.get(name, DEFAULTS[name])
        if value not in choices:
            raise ConfigError(name, value, f"choose one of {', '.join(choices)}")
    for alias, field in ALIASES.items():
        value = getattr(server_args, field)
        if alias in given and given[alias] != value:
            raise ConfigError(_flag(alias), given[alias], f"but {_conflict(alias, value)}")
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


def builtin_requested(server_args: Any) -> bool:
    return _given(server_args)["speculative_dflash_worker"] == "builtin"


def draft_graphs(server_args: Any) -> str:
    """The value of --speculative-dflash-draft-graphs."""
    return _given(server_args)["speculative_dflash_draft_graphs"]


def self_check(server_args: Any) -> bool:
    """Whether --speculative-dflash-self-check is on."""
    return _given(server_args)["speculative_dflash_self_check"] == "on"


def width(server_args: Any) -> tuple[str, tuple[int, ...] | None]:
    """The values of --speculative-dflash-width and --speculative-dflash-widths.

    Raises:
        ConfigError: the second is no list of numbers.
    """
    given = _given(server_args)
    kind, listed = given["speculative_dflash_width"], given["speculative_dflash_widths"]
    if listed is None:
        return kind, None
    try:
        return kind, tuple(int(number) for number in listed.split(","))
    except (AttributeError, ValueError):
        raise ConfigError(
            _flag("speculative_dflash_widths"),
            listed,
            "numbers separated by commas are required, such as 1,4,8,16",
        ) from None


def extension_path(server_args: Any) -> str | None:
    """The value of --speculative-dflash-extension."""
    return _given(server_args)["speculative_dflash_extension"]


def options(server_args: Any, resolved: Any) -> Options:
    """`Options` from SGLang's resolved fields and ours. Raises ConfigError."""
    given = _given(server_args)
    block, alias = resolved.speculative_num_draft_tokens, resolved.speculative_dflash_block_size
    if alias is not None and block not in (None, alias):
        raise ConfigError(
            BLOCK_ALIAS, alias, f"but {BLOCK_FLAG} is {shown(block)}; give one of them"
        )
    return Options(
        block_size=alias if block is None else block,
        window=resolved.speculative_draft_window_size,
        sinks=resolved.speculative_draft_sink_size or 0,
        draft_kv_tokens=given["speculative_dflash_draft_kv_tokens"],
        recompute_tail=given["speculative_dflash_recompute_tail"],
        recurrent_rollback=given["speculative_dflash_recurrent_rollback"],
    )


def names(server_args: Any) -> dict[str, str]:
    """What the user typed, or would type, for each setting that errors of the drafter name."""
    window, block = "speculative_dflash_draft_window_size", server_args.speculative_num_draft_tokens
    is_alias = block is None and server_args.speculative_dflash_block_size is not None
    return {
        "block_size": BLOCK_ALIAS if is_alias else BLOCK_FLAG,
        "window": _flag(window if window in _given(server_args) else ALIASES[window]),
        "sinks": "--speculative-draft-sink-size",
        "draft_kv_tokens": "--speculative-dflash-draft-kv-tokens",
        "recompute_tail": "--speculative-dflash-recompute-tail",
        "recurrent_rollback": "--speculative-dflash-recurrent-rollback",
        "attention": "--speculative-draft-attention-backend",
        "tp_size": "--tp-size",
        "worker": "--speculative-dflash-worker",
        "self_check": "--speculative-dflash-self-check",
    }


def _given(server_args: Any) -> dict[str, Any]:
    return {**DEFAULTS, **getattr(server_args, guard.ATTRIBUTE, {})}
