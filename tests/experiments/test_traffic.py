"""`python -m experiments traffic`: its floor by hand, its counting, and the goals."""

from __future__ import annotations

import json

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from experiments import runner, traffic
from experiments.kernel_traffic import StepContents
from experiments.launches import record_launches
from experiments.traffic import GOALS, LOADS, DraftLoad
from sglang_dflash.checkpoint.draft_config import DraftConfig, LayerAttention, Reach
from sglang_dflash.tools.gpu_check.floors import SHAPES, absorb_floor, propose_floor, visible
from tests.conftest import raw_config, with_own

# All loads of one shape, and of the others the first and the longest.
GOAL_ROWS = [DraftLoad(SHAPES[0], *load) for load in LOADS]
GOAL_ROWS += [DraftLoad(shape, *load) for shape in SHAPES[1:] for load in (LOADS[0], LOADS[4])]
# Of DFlash2 that with the most logits.
GOAL_ROWS.append(DraftLoad(SHAPES[3], 64, 4096, None))


@pytest.mark.parametrize("one", GOAL_ROWS, ids=str)
def test_the_goals(one: DraftLoad) -> None:
    found = traffic.figures(one)
    for part in GOALS:
        assert found[f"{part}_bytes"] >= found[f"{part}_floor"]
        assert found[f"{part}_ratio"] <= traffic.allowed(one.shape, one.requests, part), part
    assert found["propose_ratio"] <= found["propose_busy"] <= traffic.BUSY_GOAL
    config = traffic.config_of(one.shape)
    # 7 of them find the argmax's ids and mark those that are not finite. Of each group of layers 8
    # make the table, clear a ring's marks and count what it holds.
    groups = len(config.groups(Reach(one.window)))
    # Of DFlash2 four convolutions of a layer and their two products, and the selector's walk.
    new = 6 * config.num_hidden_layers + 4 if config.head.row_values else 0
    assert found["propose_launches"] <= 11 * config.num_hidden_layers + 9 + 8 * groups + new
    assert found["greedy_launches"] >= found["propose_launches"] and (
        found["propose_bytes"] <= 1.003 * found["greedy_bytes"]
    )
    assert found["unfused_launches"] > 10 * found["propose_launches"]


def test_bytes_grow_with_the_window_and_not_with_the_context() -> None:
    shape = SHAPES[0]
    near, far = (
        traffic.figures(DraftLoad(shape, 8, context, 4096))["propose_bytes"]
        for context in (8192, 131072)
    )
    wide = traffic.figures(DraftLoad(shape, 8, 131072, 16384))["propose_bytes"]
    assert near == far
    per_token = 5 * 2 * 8 * 128 * 2
    assert wide - far > 0.99 * 8 * (16384 - 4096) * per_token


def test_the_floor_by_hand() -> None:
    """Two requests of a tiny draft, in float32."""
    config = DraftConfig.from_dict(raw_config(num_hidden_layers=1))
    attention = 32 * (64 + 2 * 32) + 64 * 32 + 2 * 16
    weights = attention + 3 * 32 * 48 + 2 * 32 + 32 + 64 * 32
    tokens, drafted = 2 * 4, 2 * 3
    activations = tokens * (32 + 128 + 64 + 32 + 32 + 96 + 48 + 32) + drafted * 32
    context = (5 + 9) * 2 * 32
    logits = 2 * drafted * 64
    values = weights + activations + context + logits + tokens * 32
    assert propose_floor(config, [5, 9], None, 4) == 4 * values + 8 * tokens
    less = 4 * 2 * 32 * (14 - 5 - 7)
    assert propose_floor(config, [5, 9], 7, 4) == 4 * values + 8 * tokens - less
    absorbed = 64 * 32 + 32 + 32 * 64 + 16 + 3 * (64 + 32 + 32 + 64 + 64)
    assert absorb_floor(config, 3, 4) == 4 * absorbed


def test_what_dflash2_adds_to_the_floor() -> None:
    """The draft has a selector of rank 8 over 5 candidates, 3 taps, groups of 16 channels."""
    own = {"selector_rank": 8, "selector_top_k": 5, "conv_kernel_size": 3, "conv_group_size": 16}
    one, two = (
        DraftConfig.from_dict(raw_config(num_hidden_layers=1) | changes)
        for changes in ({}, with_own(**own))
    )
    kernels, tokens, drafted = 2 * 3 * 2, 2 * 4, 2 * 3
    convolved = 2 * (2 * 3 * 32 + 32 * kernels + tokens * (32 + kernels))
    selected = 32 * 8 + drafted * (32 + 8 + (5 + 1) * 8)
    added = propose_floor(two, [5, 9], None, 4) - propose_floor(one, [5, 9], None, 4)
    assert added == 4 * (convolved + selected)


def test_a_sliding_layer_reads_what_its_first_query_sees() -> None:
    assert visible(LayerAttention(5, True), 9, None) == 4
    assert visible(LayerAttention(5, True), 3, None) == 3
    assert visible(LayerAttention(None, False), 9, 7) == 7


def test_what_torch_moves() -> None:
    with FakeTensorMode(), torch.device("cuda"):
        a, b, ids = torch.empty(3, 4), torch.empty(4, 5), torch.empty(7, dtype=torch.int64)
        with record_launches(StepContents([])) as found:
            product = a @ b
            product.view(15)[:3]
            a[ids]
            a.fill_(0)
            a[:1] = torch.empty(1, 4)
            a.expand(9, 3, 4).sum(0)
            a.to(torch.float32)
            a[ids] = torch.empty(7, 4)
    names, moved = zip(*[(x.name, sum(x.traffic)) for x in found], strict=True)
    assert names == ("mm", "index", "fill_", "copy_", "sum", "index_put_")
    assert moved == (4 * (12 + 20 + 15), 56 + 2 * 112, 48, 32, 48 + 48, 56 + 112 + 112)


def test_the_command_prints_one_object(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(traffic, "SHAPES", SHAPES[2:3])
    monkeypatch.setattr(traffic, "LOADS", LOADS[:1])
    assert runner.main(["traffic"]) == 0
    (row,) = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    parts = [f"{part}_{of}" for part in ("propose", "absorb", "commit")
             for of in ("bytes", "floor", "ratio", "launches")]  # fmt: skip
    parts += [f"{part}_{of}" for part in ("greedy", "unfused", "lookup")
              for of in ("bytes", "launches")]  # fmt: skip
    parts += ["propose_busy", "sampled_busy"]
    assert set(row) == {"shape", "requests", "context", "window", *parts}
