"""SGLang's propagation of a hook, without a search through all modules for each.

Where a hook replaces a function, SGLang looks at every name of every module for copies of it
(`from a import f`). With all models imported, that is half of a server's start. What the nursery
has imported does not change in the servers that it forks, so those names are read once: only the
modules that a server itself imports are searched. `test_a_value_installs_whole_tables` searches
everything for what this would miss.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from types import FunctionType, ModuleType

from sglang.srt.plugins import hook_registry


class Bindings:
    """The functions that names of imported modules stand for, as they are when it is made."""

    def __init__(self) -> None:
        self._search = hook_registry._propagate_patch
        # By id, which stays theirs as long as they are kept.
        self._modules = dict[int, ModuleType]()
        self._names = defaultdict[int, list[tuple[ModuleType, str]]](list)
        # What hooks have put in place of others: names that are not read stand for it.
        self._hooked = set[int]()
        for module in self._others():
            self._modules[id(module)] = module
            for name, value in list(vars(module).items()):
                if isinstance(value, FunctionType):
                    self._names[id(value)].append((module, name))

    def _others(self) -> list[ModuleType]:
        """Imported modules whose names have not been read."""
        known = self._modules
        others = [module for module in list(sys.modules.values()) if id(module) not in known]
        # `isinstance` would load what stands there for a module.
        return [module for module in others if issubclass(type(module), ModuleType)]

    def propagate(self, original: object, wrapped: object, source: object) -> int:
        """Let every name of `original`, but for those in `source`, stand for `wrapped`. Returns
        how many there were."""
        is_known = isinstance(original, FunctionType) and id(original) not in self._hooked
        self._hooked.add(id(wrapped))
        if not is_known:
            return self._search(original, wrapped, source)
        places = self._names[id(original)] + [
            (module, name) for module in self._others() for name in list(vars(module))
        ]
        found = [
            (module, name)
            for module, name in places
            if module is not source and vars(module).get(name) is original
        ]
        for module, name in found:
            setattr(module, name, wrapped)
        return len(found)


def read_once() -> None:
    """Propagate hooks so in this process and its children."""
    hook_registry._propagate_patch = Bindings().propagate
