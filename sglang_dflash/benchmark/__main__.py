"""`python -m sglang_dflash.benchmark`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from sglang_dflash.benchmark.arguments import SERVERS, Settings, parse, without_effect
from sglang_dflash.facts.errors import ConfigError

# Setting that an error names -> the flag for it.
OWN_FLAGS = {
    "block_size": "--block-size",
    "window": "--draft-sliding-window-size",
    "worker": "--speculative-dflash-worker",
}
# Errors of other packages name their own commands' flags.
OTHER_FLAGS = {"--target": "--model", "--draft:": "--draft-model:"}


class Failed(Exception):
    """A valid benchmark that could not be carried out. The message gives the reason."""


def run(settings: Settings) -> None:
    """Measure and print. Of several ranks, only the first prints.

    Raises:
        ConfigError: a model or a data set is not available.
        Failed: the server refused a request or broke off.
    """
    if settings.backend not in SERVERS:
        from sglang_dflash.benchmark import ranks

        ranks.main(settings)
        return
    from sglang_dflash.bench.load import RequestFailed
    from sglang_dflash.benchmark import servers

    try:
        servers.main(settings)
    except RequestFailed as error:
        raise Failed(str(error)) from error


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status."""
    is_first = os.environ.get("RANK", "0") == "0"
    try:
        settings = parse(argv)
        for line in without_effect(settings) if is_first else ():
            print(f"warning: {line}", file=sys.stderr)
        run(settings)
    except (ConfigError, Failed) as error:
        if is_first:
            print(f"sglang_dflash.benchmark: {_with_own_flags(error)}", file=sys.stderr)
        return 1
    return 0


def _with_own_flags(error: Exception) -> str:
    if not isinstance(error, ConfigError):
        return str(error)
    message = error.in_words(OWN_FLAGS)
    for theirs, ours in OTHER_FLAGS.items():
        message = message.replace(theirs, ours)
    return message


if __name__ == "__main__":
    sys.exit(main())
