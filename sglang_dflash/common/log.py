"""Our lines in the log of a server, whose format has neither a logger's name nor a level's."""

from __future__ import annotations

import logging
from typing import Any


class Log(logging.LoggerAdapter[logging.Logger]):
    """The logger of a module. Its lines begin with the package's name, warnings and errors with
    their level's after it."""

    def __init__(self, module: str) -> None:
        super().__init__(logging.getLogger(module))

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        name = f"{logging.getLevelName(level)}: " if level > logging.INFO else ""
        super().log(level, f"sglang-dflash: {name}{msg}", *args, **kwargs)
