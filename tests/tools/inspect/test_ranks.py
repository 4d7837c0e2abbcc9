"""A pair that is split over GPUs, and a window that is none."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sglang_dflash.checkpoint.draft_config import DraftConfig
from sglang_dflash.drafting.model import DraftModel
from sglang_dflash.drafting.options import Options
from sglang_dflash.drafting.parallel import TensorParallel
from sglang_dflash.tools.inspect.serving import Serving
from tests.checkpoint.target_fields import GDN, TARGET
from tests.conftest import raw_config
from tests.errors import refused
from tests.tools.inspect.pairs import SERVING, found_of

HEADS = {"linear_num_key_heads": 4, "linear_num_value_heads": 4}
HYBRID = {**TARGET, "full_attention_interval": 2, **GDN, **HEADS}


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_share_the_pair(ranks: int) -> None:
    """Ranks share heads as the draft network does: of 2 K/V heads, 4 ranks have one each."""
    raw, many = raw_config(), replace(SERVING, tp_size=ranks)
    found, whole = (found_of(HYBRID, raw, serving=of) for of in (many, SERVING))
    assert found["recurrent_state_bytes"] == whole["recurrent_state_bytes"] // ranks
    with torch.device("meta"):
        model = DraftModel(DraftConfig.from_dict(raw), TensorParallel(size=ranks))
    own = 2 * sum(parameter.numel() for parameter in model.parameters())
    assert found["draft_weight_bytes"] == own
    for name in ("target_kv_bytes_per_token", "draft_kv_bytes_per_token"):
        assert found[name] == whole[name] // min(ranks, 2)
    assert (found["draft_step_bytes"] < whole["draft_step_bytes"]) == (ranks > 1)


def test_ranks_that_do_not_divide_are_refused() -> None:
    for ranks, what in ((3, "the target's num_key_value_heads (2)"), (64, "num_attention_heads")):
        with refused("tp_size", ranks, reason=what):
            found_of(TARGET, raw_config(), serving=replace(SERVING, tp_size=ranks))


def test_a_window_beyond_a_context_that_is_not_known_is_warned_of() -> None:
    """The draft's own context bounds what requests can have; memory is not blamed."""
    draft = raw_config(max_position_embeddings=4096)
    found = found_of(TARGET, draft, Options(window=999_999_999), Serving())
    (warning,) = found["warnings"]
    assert warning.startswith("--window: 999999999 is the whole of a context of 4096 tokens")
