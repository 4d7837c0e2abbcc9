"""The embedded demo pairs. A checkout has all of them, a wheel has one. The target of `smollm2` is
fetched."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from sglang_dflash.checkpoint.target_config import TargetGeometry
from sglang_dflash.common.errors import ConfigError
from sglang_dflash.tools.demo_pairs import public_target

_MEMORIZED = "Python code that both models have memorized"
_CHATS = "a chat model, SmolLM2-135M-Instruct, which is fetched once"


@dataclass(frozen=True)
class DemoPair:
    """An embedded pair.

    Attributes:
        kind: its name.
        target, draft: folders.
        prompts: texts to continue; empty for a chat pair.
    """

    kind: str
    target: Path
    draft: Path
    prompts: list[str]

    @property
    def is_hybrid(self) -> bool:
        """True if the target has recurrent layers, and so a pool of states beside the KV pool."""
        return TargetGeometry.from_pretrained(self.target).recurrent_layers > 0


def _home() -> Path:
    package = Path(__file__).parents[2]
    wheel, checkout = package / "demo_models", package.parent / "launch" / "demo_models"
    return wheel if wheel.is_dir() else checkout


def kinds() -> dict[str, str]:
    """Return the available pairs: name -> description."""
    names = sorted(path.parent.name for path in _home().glob("*/draft"))
    return {name: _CHATS if name == public_target.KIND else _MEMORIZED for name in names}


def demo_pair(kind: str) -> DemoPair:
    """Return the pair `kind`. Raises ConfigError if there is no such pair, or if its target is not
    fetched yet."""
    if kind not in kinds():
        required = f"choose one of {', '.join(kinds())}; a checkout has all pairs, the wheel one"
        raise ConfigError("demo pair", kind, required)
    folder = _home() / kind
    file = folder / "prompts.json"
    cut = json.loads(file.read_text()) if file.exists() else ()
    target = public_target.fetched_folder() if kind == public_target.KIND else folder / "target"
    return DemoPair(kind, target, folder / "draft", [item["prompt"] for item in cut])
