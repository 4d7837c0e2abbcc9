"""The embedded demo pairs: all of a checkout, or the one of an installed wheel."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from sglang_dflash.facts.errors import ConfigError
from sglang_dflash.facts.target_config import TargetGeometry


@dataclass(frozen=True)
class DemoPair:
    """An embedded pair.

    Attributes:
        kind: its name.
        target, draft: folders.
        cut: its prompts. Each has the keys `prompt`, and `file`, the file of the Python library
            that it was cut from.
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
        """What its prompts are cut from, in words."""
        # Of these the prompts are from files that were held out of the training of both models.
        if self.kind in ("code", "code-dflash2"):
            return "Python code from files that neither model has seen"
        return "Python code that both models have memorized"

    @property
    def is_hybrid(self) -> bool:
        """Whether the target has recurrent layers, and so a pool of states beside the KV pool."""
        return TargetGeometry.from_pretrained(self.target).recurrent_layers > 0


def demo_pair(kind: str) -> DemoPair:
    """The pair `kind`. Raises ConfigError with the kinds that exist."""
    package = Path(__file__).parent.parent
    for home in (package / "demo_models", package.parent / "launch" / "demo_models"):
        if home.is_dir():
            break
    kinds = sorted(path.name for path in home.glob("*") if path.is_dir())
    if kind not in kinds:
        required = f"choose one of {', '.join(kinds)}; a checkout has all pairs, the wheel one"
        raise ConfigError("demo pair", kind, required)
    folder = home / kind
    cut = tuple(json.loads((folder / "prompts.json").read_text()))
    return DemoPair(kind, folder / "target", folder / "draft", cut)
