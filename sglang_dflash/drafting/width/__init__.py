"""How many tokens of a block the target verifies: chosen per step, or fixed."""

from __future__ import annotations

from sglang_dflash.drafting.width.policy import AdaptiveWidth, FixedWidth, WidthPolicy

__all__ = ["AdaptiveWidth", "FixedWidth", "WidthPolicy"]
