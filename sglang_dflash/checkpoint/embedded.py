"""The embedded demo pairs: all of a checkout, or the one of an installed wheel."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from sglang_dflash.checkpoint.errors import ConfigError
from sglang_dflash.checkpoint.target_config import TargetGeometry


@dataclass(frozen=True)
class DemoPair:
    """The folders of a target and its draft, and prompts that the target has memorized."""

    target: Path
    draft: Path
    prompts: list[str]

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
        raise ConfigError(
            f"demo model: {kind!r} is not embedded here; there is {', '.join(kinds) or 'none'} "
            "(a checkout has all pairs, the wheel one)"
        )
    folder = home / kind
    prompts = [item["prompt"] for item in json.loads((folder / "prompts.json").read_text())]
    return DemoPair(folder / "target", folder / "draft", prompts)
