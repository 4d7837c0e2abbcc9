"""Extensions of the worker by an experiment or a test: parts of its own, and an observer of every
step.

    --speculative-dflash-extension PACKAGE.MODULE:FUNCTION

FUNCTION(target_worker) is called in every scheduler process when the worker is planned, and returns
an `Extension`.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from sglang_dflash.common.errors import ConfigError
from sglang_dflash.drafting.drafter import Proposer
from sglang_dflash.drafting.graphs import Recorder
from sglang_dflash.drafting.width import WidthPolicy
from sglang_dflash.serving.step.step import StepObserver


@dataclass(frozen=True)
class Extension:
    """Parts that replace the worker's own; None keeps the worker's.

    Attributes:
        make_drafter: makes the drafter, called as `Drafter` is.
        observer: is shown every decode step.
        width_policy: makes the policy that chooses verify widths, from `verify_block`.
        recorder: makes what records the drafter's steps, where the worker records none.
    """

    make_drafter: Callable[..., Proposer] | None = None
    observer: StepObserver = field(default_factory=StepObserver)
    width_policy: Callable[[int], WidthPolicy] | None = None
    recorder: Callable[[], Recorder] | None = None


def load_extension(path: str | None, target_worker: Any) -> Extension:
    """Call the function that `path` names, `MODULE:FUNCTION`. None adds nothing.

    Raises:
        ConfigError: there is no such function, or it returns something else.
    """
    if path is None:
        return Extension()
    if path.count(":") != 1:
        raise ConfigError("extension", path, "give MODULE:FUNCTION")
    try:
        function = pkgutil.resolve_name(path)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError("extension", path, f"it cannot be imported ({error})") from error
    extension = function(target_worker)
    if not isinstance(extension, Extension):
        returned = type(extension).__name__
        raise ConfigError("extension", path, f"it returned a {returned}, not an Extension")
    return extension
