"""The SGLang release that our patches were written for."""

from __future__ import annotations

import importlib.metadata

from sglang_dflash.common.log import Log
from sglang_dflash.common.machine import version

logger = Log(__name__)


def needed() -> str:
    """The SGLang release that we were written for, as a requirement: "sglang==VERSION"."""
    # pyproject.toml is the only place that names the version.
    requirements = importlib.metadata.requires("sglang-dflash") or ()
    return next(r for r in requirements if r.startswith("sglang=="))


def unsupported() -> str | None:
    """Return why our plugins do nothing with the installed SGLang, or None."""
    installed = version("sglang")
    if installed is None:
        return "sglang is not installed"
    if needed() == f"sglang=={installed}":
        return None
    return f"sglang-dflash needs {needed()}, this is sglang=={installed}"


def supported(part: str) -> bool:
    """Return whether the installed SGLang is the pinned one; logs an error that names both if not.

    Args:
        part: the part that is left out otherwise, for the message.
    """
    problem = unsupported()
    if problem is not None:
        logger.error("%s: %s", problem, part)
    return problem is None
