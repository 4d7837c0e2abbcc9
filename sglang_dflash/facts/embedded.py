"""The embedded demo pairs: all of a checkout, or the one of an installed wheel. The target of one
is fetched."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from sglang_dflash.facts import public_target
from sglang_dflash.facts.errors import ConfigError
from sglang_dflash.facts.target_config import TargetGeometry

_MEMORIZED = "Python code that both models have memorized"
# What the prompts of the others are.
_TEXTS = {
    "code": "Python code from files that neither model has seen",
    "code-dflash2": "Python code from files that neither model has seen",
    public_target.KIND: "chats, with SmolLM2-135M-Instruct, which is fetched once",
}


@dataclass(frozen=True)
class DemoPair:
    """An embedded pair.

    Attributes:
        kind: its name.
        target, draft: folders.
        cut: its prompts. Each has the keys `prompt`, and `file`, the file of the Python library
            that it was cut from. A pair that chats has none.
    """

    kind: str
    target: Path
    draft: Path
    cut: tuple[dict[str, str], ...]

    @property
    def prompts(self) -> list[str]:
        return [item["prompt"] for item in self.cut]

    @property
    def text(self) -> str:
        """What its prompts are, in words."""
        return _TEXTS.get(self.kind, _MEMORIZED)

    @property
    def is_hybrid(self) -> bool:
        """Whether the target has recurrent layers, and so a pool of states beside the KV pool."""
        return TargetGeometry.from_pretrained(self.target).recurrent_layers > 0


def _home() -> Path:
    package = Path(__file__).parent.parent
    wheel, checkout = package / "demo_models", package.parent / "launch" / "demo_models"
    return wheel if wheel.is_dir() else checkout


def kinds() -> dict[str, str]:
    """The pairs that are here, by name, and what each is in words."""
    found = sorted(path.parent.name for path in _home().glob("*/draft"))
    return {kind: _TEXTS.get(kind, _MEMORIZED) for kind in found}


def demo_pair(kind: str) -> DemoPair:
    """The pair `kind`. Raises ConfigError with the kinds that exist, or if its target is not
    fetched yet."""
    if kind not in kinds():
        required = f"choose one of {', '.join(kinds())}; a checkout has all pairs, the wheel one"
        raise ConfigError("demo pair", kind, required)
    folder = _home() / kind
    prompts = folder / "prompts.json"
    cut = tuple(json.loads(prompts.read_text())) if prompts.exists() else ()
    target = public_target.fetched() if kind == public_target.KIND else folder / "target"
    return DemoPair(kind, target, folder / "draft", cut)
