"""Our flags, the published commands' spelling of SGLang's, and their way into the scheduler."""

from __future__ import annotations

import argparse
import functools
import sys
from dataclasses import dataclass, field, fields
from typing import Any

import msgspec

from sglang_dflash.checkpoint.hub import check_path
from sglang_dflash.common.command_line import end_in_one_line, flag_of
from sglang_dflash.common.errors import ConfigError
from sglang_dflash.common.log import Log
from sglang_dflash.common.markdown import plain
from sglang_dflash.drafting.options import Options, ResolvedOptions
from sglang_dflash.drafting.width import AdaptiveWidth, WidthPolicy
from sglang_dflash.patches.patch import is_loaded
from sglang_dflash.serving.start.launch import check_port, listens
from sglang_dflash.serving.start.one_line_errors import use_one_line
from sglang_dflash.serving.start.refused_settings import (
    BLOCK_ALIAS,
    BLOCK_FLAG,
    WIDTH_FLAG,
    asked_block,
    why_not_adaptive,
)
from sglang_dflash.serving.start.server_flags import REMOVED
from sglang_dflash.serving.start.unserved import IGNORED

logger = Log(__name__)

# The attribute of SGLang's arguments that takes the values of our flags to every process: SGLang
# keeps underscore attributes apart from its fields, and pickles them.
ATTRIBUTE = "_sglang_dflash"
PREFIX = "speculative_dflash_"
# The published commands' spelling -> SGLang 0.5.23's field.
ALIASES = {
    "speculative_dflash_draft_window_size": "speculative_draft_window_size",
    "mamba_scheduler_strategy": "mamba_radix_cache_strategy",
}
# The plugins with the repairs and with our flags, by their entry points.
GUARDS, FLAGS = "dflash_repairs", "dflash"
ALGORITHM_FLAG = "--speculative-algorithm"


def _flag(default: str | None, meaning: str, *, otherwise: str = "", **of_argparse: Any) -> Any:
    """A field whose text stands once: in --help, and in docs/flags.md (`launch/docs_tables.py`).

    Args:
        meaning: in Markdown.
        otherwise: what is taken if the default is None, in Markdown.
    """
    shown = plain(otherwise) if default is None else default
    text = f"{plain(meaning)}. Default: {shown}." if shown else f"{plain(meaning)}."
    docs = {"meaning": meaning, "otherwise": otherwise}
    return field(
        default=default, metadata={"docs": docs, "argparse": {"help": text, **of_argparse}}
    )


@dataclass(frozen=True)
class ServerFlags:
    """Our flags as they were given. `--speculative-dflash-` stands before each name."""

    worker: str = _flag(
        "auto",
        "`auto` takes the worker of sglang-dflash if it can serve the pair ([limits](limits.md)), "
        "`builtin` takes SGLang's own",
        choices=("auto", "builtin"),
    )
    draft_kv_tokens: int | None = _flag(
        None,
        "entries of each [ring](how-it-works.md#draft-kv-is-a-cache): the draft KV cache of layers "
        "that slide or have a window",
        otherwise="enough for the running requests and one more",
        type=int,
    )
    recurrent_rollback: str = _flag(
        Options.recurrent_rollback,
        "how recurrent layers of the target follow an accepted prefix: `snapshot` keeps the state "
        "after every drafted token, `replay` keeps their inputs and folds the accepted ones in; "
        "`auto` is replay for Gated DeltaNet layers and SGLang's snapshots for others",
        choices=("auto", "replay", "snapshot"),
    )
    draft_graphs: str = _flag(
        "auto",
        "`auto` captures the drafter's steps in CUDA graphs if the target's are captured, at the "
        "same batch sizes; `off` does not ([GPU](gpu.md))",
        choices=("auto", "off"),
    )
    width: str = _flag(
        "auto",
        "how many tokens of a block the target verifies. `fixed`: all of them in every step. "
        "`adaptive`: in every step as many as pay off, down to 1, which is plain decoding "
        "([width](width.md)). `auto`: adaptive on a CPU, fixed elsewhere",
        choices=("auto", "adaptive", "fixed"),
    )
    lookup: str = _flag(
        "auto",
        "`on`: drafts are also looked up in the request's own text, for answers that repeat parts "
        "of it, such as edits and quotes ([lookup](lookup.md)). `auto`: `on` on a CPU, else `off`",
        choices=("auto", "on", "off"),
    )
    self_check: str = _flag(
        "on",
        "at start-up, `on` compares kernels and graphs of the drafter with torch; if one differs, "
        "the server does not start. `off` does not compare",
        choices=("on", "off"),
    )
    extension: str | None = _flag(
        None,
        "for experiments: `MODULE:FUNCTION` that supplies another drafter or width policy, or "
        "watches every step (`sglang_dflash/serving/step/extension.py`)",
        metavar="MODULE:FUNCTION",
    )

    @classmethod
    def of(cls, server_args: Any) -> ServerFlags:
        """Return the values of our flags in SGLang's arguments."""
        values = _given(server_args)
        named = {each.name: PREFIX + each.name for each in fields(cls)}
        return cls(**{name: values[long] for name, long in named.items() if long in values})


# Keyword arguments of `sglang.Engine` that are ours.
NAMES = tuple(PREFIX + each.name for each in fields(ServerFlags))


def _given(server_args: Any) -> dict[str, Any]:
    """Return the flags that were given, by the names of their fields; empty if none was."""
    return getattr(server_args, ATTRIBUTE, {})


# Setting -> its flag.
TYPED = {
    **{each.name: flag_of(PREFIX + each.name) for each in fields(ServerFlags)},
    "target": "--model-path",
    "draft": "--speculative-draft-model-path",
    "port": "--port",
    "window": "--speculative-draft-window-size",
    "sinks": "--speculative-draft-sink-size",
    "attention": "--speculative-draft-attention-backend",
    "tp_size": "--tp-size",
}


def add_flags(_result: None, parser: argparse.ArgumentParser) -> None:
    """After `ServerArgs.add_cli_args`: our flags, another spelling of two of SGLang's, and a line
    about a mistake in place of the usage, which has 500, or of a traceback."""
    _add_ours(parser)
    actions = parser._option_string_actions
    for alias, name in ALIASES.items():
        action = actions[flag_of(alias)] = actions[flag_of(name)]
        action.option_strings = [*action.option_strings, flag_of(alias)]
    actions[ALGORITHM_FLAG].type = _algorithm
    parser.error = functools.partial(  # type: ignore[method-assign]
        end_in_one_line, parser, removed=REMOVED
    )


def _add_ours(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sglang-dflash")
    for row in fields(ServerFlags):
        keywords = row.metadata["argparse"]
        group.add_argument(flag_of(PREFIX + row.name), default=argparse.SUPPRESS, **keywords)


def print_help() -> None:
    """Print our flags as they stand at the end of a server's help, unless SGLANG_PLUGINS leaves
    them out."""
    from sglang.srt.plugins import GENERAL_PLUGINS_GROUP, load_plugins_by_group

    if FLAGS not in load_plugins_by_group(GENERAL_PLUGINS_GROUP):
        return
    spellings = ", ".join(f"{flag_of(alias)} is {flag_of(name)}" for alias, name in ALIASES.items())
    notes = (
        f"Other spellings: {spellings}. With this package's worker a DFLASH draft honors "
        f"{TYPED['sinks']}."
    )
    parser = argparse.ArgumentParser(usage=argparse.SUPPRESS, add_help=False, epilog=notes)
    _add_ours(parser)
    print("\n--- Flags of sglang-dflash, for the language model server ---\n")
    print(parser.format_help())


def _algorithm(name: str) -> str:
    """Return the name of an algorithm that SGLang or another plugin serves.

    Raises:
        ArgumentTypeError: there is none of that name. SGLang would tell in a traceback, later.
    """
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    try:
        SpeculativeAlgorithm.from_string(name)
    except ValueError:
        names = ", ".join(SpeculativeAlgorithm.__members__)
        # As argparse words it, which `end_in_one_line` reads.
        message = f"invalid choice: {name.upper()!r} (choose from {names})"
        raise argparse.ArgumentTypeError(message) from None
    return name


def keep_flags(server_args: Any, _cls: type, namespace: argparse.Namespace) -> Any:
    """After `ServerArgs.from_cli_args`: keep the values of our flags with SGLang's."""
    use_one_line()
    try:
        _check_command_line(namespace)
    except ConfigError as error:
        raise error.named(TYPED) from None
    values = {name: getattr(namespace, name) for name in NAMES if hasattr(namespace, name)}
    return _attach(server_args, values)


def _check_command_line(namespace: argparse.Namespace) -> None:
    """Raise ConfigError for what SGLang would find minutes later, or tell in a traceback."""
    if getattr(namespace, "model_path", None) is not None:
        check_path("target", namespace.model_path)
    if listens(sys.argv) and not namespace.node_rank:
        check_port(namespace.host, namespace.port)


def server_args_from_kwargs(**kwargs: Any) -> Any:
    """For `sglang.Engine(**kwargs)`: SGLang's arguments, ours attached and aliases resolved.

    Raises:
        ConfigError: a value that its flag does not take, or a flag that was removed.
    """
    from sglang.srt.server_args import ServerArgs

    for name, instead in REMOVED.items():
        if name in kwargs:
            raise ConfigError(name, kwargs[name], f"this flag was removed; {instead}")
    values = {name: kwargs.pop(name) for name in NAMES if name in kwargs}
    for alias, name in ALIASES.items():
        if alias in kwargs:
            kwargs[name] = kwargs.pop(alias)
    return _attach(ServerArgs(**kwargs), values)


def _attach(server_args: Any, values: dict[str, Any]) -> Any:
    for row in fields(ServerFlags):
        # The command line's parser has checked them; keyword arguments pass none.
        choices = row.metadata["argparse"].get("choices")
        value = values.get(PREFIX + row.name, row.default)
        if choices is not None and value not in choices:
            flag = flag_of(PREFIX + row.name)
            raise ConfigError(flag, value, f"choose one of {', '.join(choices)}")
    setattr(server_args, ATTRIBUTE, values)
    return server_args


def warn_unguarded(tokenizer_workers: int) -> None:
    """Log one line if requests are tokenized where the request guard does not run, though the
    plugin that guards is loaded."""
    if is_loaded(GUARDS) and tokenizer_workers > 1:
        logger.warning(
            "--tokenizer-worker-num %d: SGLang loads no plugins in tokenizer workers, so the "
            "request guard does not run, and a bad request may end the server; 1 guards it",
            tokenizer_workers,
        )


def warn_without_effect(server_args: Any, reason: str) -> None:
    """Log one line if flags of our worker are given to a server that it does not serve."""
    lost = [flag_of(name) for name in _given(server_args) if name != PREFIX + "worker"]
    if lost:
        logger.warning("%s: no effect %s", ", ".join(lost), reason)


def warn_ignored(server_args: Any) -> None:
    """Log a line for SGLang's flags that our worker does not read, if any has not its default."""
    changed = {
        flag_of(row.name): value
        for row in msgspec.structs.fields(type(server_args))
        if (value := getattr(server_args, row.name)) != row.default
    }
    for row in IGNORED:
        lost = [flag for flag in changed if row.has(flag) and changed[flag] not in row.followed]
        if lost:
            logger.warning("%s: no effect: %s", ", ".join(lost), row.why)


def flag_options(server_args: Any, resolved: Any) -> Options:
    """`Options` from SGLang's resolved fields and ours. Raises ConfigError."""
    ours = ServerFlags.of(server_args)
    return Options(
        verify_block=asked_block(resolved),
        window=resolved.speculative_draft_window_size,
        sinks=resolved.speculative_draft_sink_size or 0,
        draft_kv_tokens=ours.draft_kv_tokens,
        recurrent_rollback=ours.recurrent_rollback,
        looks_up=ours.lookup == "on" or (ours.lookup == "auto" and _device(resolved) == "cpu"),
    )


def names(server_args: Any) -> dict[str, str]:
    """Return the flag that the user typed, or would type, for each setting that an error may
    name."""
    block = server_args.speculative_num_draft_tokens
    is_alias = block is None and server_args.speculative_dflash_block_size is not None
    return {**TYPED, "verify_block": BLOCK_ALIAS if is_alias else BLOCK_FLAG}


def width_policy(server_args: Any, settings: Any, options: ResolvedOptions) -> WidthPolicy:
    """The policy that the flags name.

    `auto` is `adaptive` on a plain CPU, unless a setting excludes it, and `fixed` elsewhere.

    Args:
        settings: SGLang's, resolved.
        options: with the sizes of blocks.

    Raises:
        ConfigError: `adaptive` is given with a setting that excludes it.
    """
    policy, excluded = (
        ServerFlags.of(server_args).width,
        why_not_adaptive(settings, _device(settings)),
    )
    if policy == "adaptive" and excluded is not None:
        raise ConfigError(WIDTH_FLAG, policy, excluded)
    if policy == "auto":
        policy = "adaptive" if excluded is None and _device(settings) == "cpu" else "fixed"
    if policy == "adaptive":
        return AdaptiveWidth(options.adaptive_widths())
    return WidthPolicy(options.verify_block)


def _device(settings: Any) -> str:
    return settings.device or "cpu"
