"""Drafts in the layout of the speculators library, made from z-lab's."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.conftest import rewrite

WRAPPED = ("architectures", "block_size", "layer_types", "sliding_window")


def layout(raw: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    """A parsed config.json of z-lab's layout in theirs."""
    own = raw["dflash_config"]
    beside = ("dflash_config", "num_target_layers", "is_causal", *WRAPPED)
    return {
        **{name: raw[name] for name in WRAPPED if name in raw},
        "speculators_model_type": "dflash",
        "mask_token_id": own["mask_token_id"],
        "aux_hidden_state_layer_ids": [i + 1 for i in own["target_layer_ids"]],
        "sliding_window_non_causal": raw.get("is_causal") is False,
        "speculators_config": {"algorithm": "dflash"},
        "transformer_layer_config": {k: v for k, v in raw.items() if k not in beside},
        **changes,
    }


def rewrite_in_that_layout(folder: Path, lm_head: Tensor, tokens: Tensor) -> None:
    """Give the draft in `folder` that layout, and rows int64 `tokens`, ascending, of `lm_head`."""
    raw = json.loads((folder / "config.json").read_text())
    raw = layout(raw, draft_vocab_size=len(tokens))
    (folder / "config.json").write_text(json.dumps(raw))
    marked = torch.zeros(len(lm_head), dtype=torch.bool)
    marked[tokens] = True
    rows = {"lm_head.weight": lm_head[tokens], "t2d": marked}
    rewrite(folder, lambda t: t.update(rows, d2t=tokens - torch.arange(len(tokens))))
