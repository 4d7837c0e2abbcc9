"""The embedded demo pairs, found in a checkout or inside the installed package."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from sglang_dflash.checkpoint.errors import ConfigError


@dataclass(frozen=True)
class DemoPair:
    """The folders of a target and its draft, and prompts from the text that both memorized."""

    target: Path
    draft: Path
    prompts: list[str]

    @property
    def is_hybrid(self) -> bool:
        """Whether the target has recurrent layers, and so a pool of states beside the KV pool."""
        config = json.loads((self.target / "config.json").read_text())
        return "linear_attention" in (config.get("layer_types") or ())


def demo_pair(kind: str) -> DemoPair:
    """The pair of that kind ("dense" or "hybrid").

    Raises:
        ConfigError: no such pair is embedded; the message names those that are.
    """
    package = Path(__file__).parent.parent
    for home in (package / "demo_models", package.parent / "launch" / "demo_models"):
        if home.is_dir():
            break
    kinds = sorted(p.name for p in home.glob("*") if p.is_dir())
    if kind not in kinds:
        raise ConfigError(
            f"demo model: {kind!r} is not embedded here; there is {', '.join(kinds) or 'none'}"
        )
    folder = home / kind
    prompts = [item["prompt"] for item in json.loads((folder / "prompts.json").read_text())]
    return DemoPair(folder / "target", folder / "draft", prompts)
