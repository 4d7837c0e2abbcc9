"""A server's command line before SGLang is imported: what can be seen to be wrong at once."""

from __future__ import annotations

import errno
import multiprocessing
import socket
from collections.abc import Mapping, Sequence
from os.path import exists, isfile
from pathlib import Path
from typing import Any

from sglang_dflash.checkpoint.draft_config import DraftConfig
from sglang_dflash.checkpoint.hub import check_path
from sglang_dflash.checkpoint.origin import published_draft
from sglang_dflash.checkpoint.published import check_target_folder
from sglang_dflash.checkpoint.target_config import TargetGeometry
from sglang_dflash.common.errors import ConfigError, UnsupportedDraft, shown_pair
from sglang_dflash.drafting.options import asks_dflash
from sglang_dflash.serving.start.server_flags import has_serve, known_settings

_NAMES = {"target": "--model-path", "draft": "--speculative-draft-model-path"}


def listens(argv: Sequence[str]) -> bool:
    """Return whether a command is `python -m sglang.launch_server` or `sglang serve`."""
    return Path(argv[0]).name == "launch_server.py" or has_serve(argv[:2])


def asks_for_help_of_serve(argv: Sequence[str]) -> bool:
    """Return whether a command is `sglang serve` with --help, which SGLang answers without its
    plugins."""
    return has_serve(argv[:2]) and not {"-h", "--help"}.isdisjoint(argv)


def refuse_early(argv: Sequence[str]) -> None:
    """End the process with one line if a server with this command line could not start.

    The servers' own checks come after half a minute of imports, and judge the rest: also a command
    line that only their parser can read.

    Raises:
        SystemExit: with status 1.
    """
    # Its children have the same command line.
    if not listens(argv) or multiprocessing.parent_process() is not None:
        return
    settings = known_settings(argv)
    # A file of flags is read by the server's parser only, which also answers --help.
    if settings is None or not {"help", "config"}.isdisjoint(settings):
        return
    try:
        _check(settings)
    except ConfigError as error:
        raise SystemExit(f"sglang-dflash: {error.named(_NAMES)}") from None


def _check(settings: Mapping[str, Any]) -> None:
    """Raise ConfigError."""
    target, draft = settings.get("model_path"), settings.get("speculative_draft_model_path")
    if target is not None:
        check_path("target", target)
    if target is None or not asks_dflash(settings.get("speculative_algorithm")):
        return
    if settings.get("enable_return_aux_hidden_states"):
        # No draft: the algorithm is only whose layer numbers are meant.
        return
    check_target_folder(target)
    if draft is None:
        published_draft(target)
        return
    check_path("draft", draft)
    if exists(draft) and settings.get("speculative_dflash_worker") != "builtin":
        _compare_folders(target, draft)


def _compare_folders(target: str, draft: str) -> None:
    """Compare the configs of two folders. Raises ConfigError if the draft does not fit."""
    try:
        config = DraftConfig.from_pretrained(draft)
    except UnsupportedDraft:
        return
    if not isfile(Path(target) / "config.json"):
        return
    try:
        geometry = TargetGeometry.from_pretrained(target)
    # SGLang may read what is not read here.
    except ConfigError:
        return
    config.check_target(
        hidden_size=geometry.hidden_size,
        vocab_size=geometry.vocab_size,
        num_layers=geometry.num_hidden_layers,
        pair=shown_pair(draft, target),
    )


def check_port(host: str, port: int) -> None:
    """Raise ConfigError if another program listens there."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind((host, port))
        except (OSError, OverflowError) as error:
            if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
                required = f"another program listens there, at {host}; end it, or give another port"
                raise ConfigError("port", port, required) from None
