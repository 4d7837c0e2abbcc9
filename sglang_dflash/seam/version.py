"""The SGLang release that our seams were written for."""

from __future__ import annotations

import importlib.metadata
import logging

logger = logging.getLogger(__name__)


def needed() -> str:
    """The SGLang release that we were written for, as a requirement: "sglang==VERSION"."""
    # pyproject.toml is the only place that names the version.
    requirements = importlib.metadata.requires("sglang-dflash") or ()
    return next(r for r in requirements if r.startswith("sglang=="))


def supported(what: str) -> bool:
    """Whether the installed SGLang is the pinned one; logs an error that names both if not.

    Args:
        what: what is left out otherwise, for the message.
    """
    pinned = needed()
    found = importlib.metadata.version("sglang")
    if pinned == f"sglang=={found}":
        return True
    logger.error("sglang-dflash needs %s, this is sglang==%s: %s", pinned, found, what)
    return False
