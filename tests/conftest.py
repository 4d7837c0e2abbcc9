"""Shared by all tests: small random draft checkpoints, and Triton's interpreter where there is no GPU."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from sglang_dflash.checkpoint.draft_config import DraftConfig
from sglang_dflash.core.model import DraftModel

if not torch.cuda.is_available():
    # Triton reads it when a kernel is defined, its own language included: before anything else imports Triton. Then it is taken
    # back, so that no server of a test inherits it.
    os.environ["TRITON_INTERPRET"] = "1"
    import dflash_kernels.gated_delta_fold  # noqa: F401

    del os.environ["TRITON_INTERPRET"]


# Tests that start SGLang servers, in two parts that share none; the first part that fits has a test.
SERVERS = {
    "recurrent targets, features and bench": (
        "tests/engine/test_hybrid",
        "tests/engine/test_features",
        "tests/engine/test_bench",
    ),
    "all others": ("tests/engine/",),
}


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With several workers (`-n 2`) a part's servers run one after another, and tests without servers wherever there is time."""
    from xdist.scheduler import LoadScopeScheduling

    class ByServers(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return next(
                (part for part, tests in SERVERS.items() if nodeid.startswith(tests)), nodeid
            )

    return ByServers(config, log)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def raw_config(**changes: Any) -> dict[str, Any]:
    """config.json of a tiny draft in the published layout."""
    own = {"mask_token_id": 63, "target_layer_ids": [1, 3]}
    raw = {
        "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "hidden_act": "silu",
        "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "max_position_embeddings": 4096, "vocab_size": 64, "block_size": 4,
        "num_target_layers": 6, "dflash_config": own,
    }  # fmt: skip
    return {**raw, **changes}


def random_model(raw: dict[str, Any]) -> DraftModel:
    """A draft with random weights of a size at which attention and norms matter."""
    model = DraftModel(DraftConfig.from_dict(raw))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3 if parameter.ndim == 2 else 1.0)
    return model
