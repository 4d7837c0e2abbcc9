"""SGLang's functions without our rows."""

from __future__ import annotations

import pkgutil
from typing import Any

from sglang_dflash.patches.patch import REGISTRY


def original(target: str) -> Any:
    """SGLang's function, also if another test of this process has loaded the plugins.

    Only what its registry has put around it is taken off, not SGLang's own decorators.
    """
    function = pkgutil.resolve_name(target)
    while getattr(function, "__globals__", {}).get("__name__") == REGISTRY:
        function = function.__wrapped__
    return function
