"""Prefills of a hybrid target on a faked GPU run in graphs, with our worker as with SGLang's."""

from __future__ import annotations

import random
import re
from collections import Counter

import pytest

from sglang_dflash.tools.bench.server import Server
from tests.engine import client
from tests.engine.servers import ServerConfig
from tests.fake_gpu import servers as g

# Tokens of prompts, and whether a prefill of so many replays a graph: the largest has 128.
PROMPTS = {40: True, 100: True, 200: False}
# SGLang's hybrid backend reads an index on the host, if a prompt reaches a checkpoint.
CHECKPOINTS = "_init_track_conv_indices"
# On a real GPU, the copies of states after a verify forward are a kernel.
TORCH_CODE = "sglang_dflash/plugins/platform_cpu/"


def prefills(server: Server) -> list[tuple[int, bool]]:
    """New tokens of each prefill that the server has logged, and whether it replayed a graph."""
    lines = re.findall(r"#new-token: (\d+),.*cuda graph: (\w+)", server.log.read_text())
    return [(int(tokens), graph == "True") for tokens, graph in lines]


def waits(server: Server) -> Counter[str]:
    """The host's waits for the GPU so far, by function."""
    report = server.info()["internal_states"][0]["fake_gpu"]["waits"]
    return Counter(
        {place.rpartition(":")[2]: n for place, n in report.items() if TORCH_CODE not in place}
    )


@pytest.mark.long
@pytest.mark.parametrize("config", [g.HYBRID_GRAPHS, g.HYBRID_BUILTIN_GRAPHS], ids=str)
def test_prefills_replay_graphs(config: ServerConfig, server: Server) -> None:
    """And the host waits for none of them but where SGLang does."""
    logged, before, draw = len(prefills(server)), waits(server), random.Random(0)
    for tokens in PROMPTS:
        # Ids of ordinary tokens of the demo pair.
        body = {"input_ids": draw.choices(range(260, 500), k=tokens)}
        client.post(server, "generate", {**body, "sampling_params": client.GREEDY})
    client.until(lambda: len(prefills(server)) == logged + len(PROMPTS))
    assert prefills(server)[logged:] == list(PROMPTS.items())
    waited = waits(server) - before
    decoding = waited.pop("process_batch_result_decode")
    assert decoding > 0
    checkpoints = sum(tokens >= 64 for tokens in PROMPTS)
    assert waited == {"process_batch_result_prefill": len(PROMPTS), CHECKPOINTS: checkpoints}
