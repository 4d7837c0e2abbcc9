"""`python -m experiments gpu_servers`, the command for a lent GPU, on a faked one: published shapes
made small, with the flags of docs/gpu.md."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from experiments.shapes import folder_of, write_draft_weights
from sglang_dflash.checkpoint.origin import published_draft
from tests.fake_gpu.gpu import MEMORY_GIB
from tests.fake_gpu.hooks import TWINS

FLAGS = (
    "--attention-backend triton --cuda-graph-backend-prefill disabled "
    "--cuda-graph-max-bs-decode 32 --mem-fraction-static 0.6"
)
SMALL = {"hidden_size": 128, "intermediate_size": 256, "vocab_size": 2048}
TWO_LAYERS = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 1}
# What is not as published, of the target and of the draft.
DENSE: tuple[dict[str, Any], dict[str, Any]] = (
    {**TWO_LAYERS, "num_hidden_layers": 4, "layer_types": 4 * ["full_attention"]},
    {
        **TWO_LAYERS,
        "num_target_layers": 4,
        "dflash_config": {"mask_token_id": 2047, "target_layer_ids": [1, 2]},
    },
)


def made_small(role: str, name: str, changes: dict[str, Any], home: Path) -> Path:
    """The folder that the command makes of a published shape, with a few layers and heads of their
    published size."""
    file = folder_of(role, name, home) / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **SMALL, **changes}))
    return file.parent


@pytest.mark.long
@pytest.mark.engine
def test_every_server_answers(tmp_path: Path) -> None:
    target = "Qwen/Qwen3-8B"
    models = [
        made_small(role, name, how, tmp_path)
        for role, name, how in zip(
            ("target", "draft"), (target, published_draft(target)), DENSE, strict=True
        )
    ]
    write_draft_weights(models[1])
    arms, out = ("dflash", "ar", "builtin"), tmp_path / "out.json"
    command = [sys.executable, "-W", "ignore", "-m", "tests.fake_gpu"]
    command += ["experiments", "gpu_servers", "--target", models[0], "--draft", models[1]]
    command += ["--arms", ",".join(arms), "--concurrency", "1,3", "--prompt-tokens", "70"]
    command += ["--max-new-tokens", "9", "--rounds", "1", "--start-timeout-s", "240"]
    command += ["--flags", FLAGS, "--out", out]
    env = {**os.environ, TWINS: "1", MEMORY_GIB: "6"}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, "\n".join(line[:200] for line in done.stdout.splitlines())
    servers = json.loads(out.read_text())["servers"]
    assert tuple(servers) == arms
    for name, server in servers.items():
        assert "--speculative-draft-load-format" in server["flags"]
        assert server["kv_tokens"] > 100_000 and "H100" in server["device"]
        for level in server["levels"].values():
            assert level["acceptance_length"] == (None if name == "ar" else 4.0)
