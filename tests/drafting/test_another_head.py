"""A third draft head, defined in this file only and named in the two lists of heads: nothing else
knows it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from sglang_dflash.checkpoint import heads as described
from sglang_dflash.checkpoint.draft_config import DraftConfig
from sglang_dflash.checkpoint.fields import Fields
from sglang_dflash.checkpoint.heads.head import HeadConfig, Network
from sglang_dflash.common.errors import ConfigError, UnsupportedDraft
from sglang_dflash.drafting import heads
from sglang_dflash.drafting.attention.capabilities import CAPABILITIES
from sglang_dflash.drafting.graphs import GraphedDrafter
from sglang_dflash.drafting.heads.head import DraftHead, TargetHead
from sglang_dflash.drafting.heads.plain import HeadModule, KernelBytes
from sglang_dflash.drafting.model import DraftModel
from sglang_dflash.drafting.noise import BlockNoise, SampledBlocks, likeliest
from sglang_dflash.drafting.ops import TorchOps
from sglang_dflash.drafting.options import Options
from sglang_dflash.drafting.parallel import TensorParallel
from sglang_dflash.drafting.random_inputs import Cases, RandomInputs
from sglang_dflash.drafting.recording_check import check_recording
from sglang_dflash.drafting.self_check import SelfCheckFailed, check_ops
from sglang_dflash.drafting.weights import check_new, load_model, reload, save_model
from sglang_dflash.memory.draft_memory import (
    DraftMemory,
    NarrowForwards,
    StepSizes,
    draft_memory,
)
from sglang_dflash.memory.sizes import draft_weight_bytes
from sglang_dflash.tools.gpu_check import parts
from sglang_dflash.tools.gpu_check.floors import propose_floor
from tests.checkpoint.target_fields import TARGET
from tests.conftest import random_model, raw_config, rewrite, with_own
from tests.drafting.test_recording import drafter_of, table
from tests.recording import OpRecorder
from tests.tools.inspect.pairs import found_of

TABLE, GAIN = "bigram_table", "bigram_gain.weight"


@dataclass(frozen=True)
class BigramConfig(HeadConfig):
    """Each draft's logits are raised by a row of a table, that of the token before it, by its
    share in a gain of the hidden state."""

    architectures = ("BigramDraftModel",)
    speculators_type = None
    keys = ("bigram_share",)
    tables = (TABLE,)

    share: int = 1

    @classmethod
    def read(cls, fields: Fields) -> BigramConfig | None:
        name = "bigram_share"
        return cls(fields.positive_int(name, most=9)) if name in fields else None

    @property
    def description(self) -> str:
        return f"Bigram: {self.share}"

    def problems(self, network: Network) -> Iterator[tuple[str, object, str]]:
        if self.share >= network.num_hidden_layers + 3:
            yield "bigram_share", self.share, "a smaller one is required"

    def tensors(self, network: Network) -> dict[str, tuple[int, ...]]:
        vocabulary = network.vocab_size
        return {TABLE: (vocabulary, vocabulary), GAIN: (1, network.hidden_size)}

    @property
    def row_values(self) -> int:
        return 64

    @property
    def candidates(self) -> int:
        return 1

    def moved(self, network: Network, tokens: int, drafted: int) -> int:
        return 5 * drafted

    @property
    def position_bytes(self) -> int:
        return 1000

    def activations(self, network: Network) -> int:
        return 1000


class BigramModule(HeadModule):
    def __init__(self, config: DraftConfig, tp: TensorParallel, ops: TorchOps) -> None:
        super().__init__(config, tp, ops)
        self.bigram_table = nn.Parameter(torch.zeros(config.vocab_size, config.vocab_size))
        self.bigram_gain = nn.Linear(config.hidden_size, 1, bias=False)
        self.share = cast(BigramConfig, config.head).share

    def over(self, target: TargetHead) -> DraftHead:
        return BigramHead(self, target)

    def check_cases(self, draw: RandomInputs, requests: int, block: int) -> Cases:
        x = draw.floats(requests, block, 8)
        return {"bigram": lambda ops: (ops.silu_mul(x),)}

    def timed_ops(
        self, logits: Tensor, bonus: Tensor, noise: BlockNoise, kernel_bytes: KernelBytes
    ) -> dict[str, tuple[Callable[[], object], int]]:
        return {"bigram": (lambda: self.bigram_table[bonus], 4 * len(bonus))}


@dataclass(frozen=True)
class BigramHead:
    own: BigramModule
    target: TargetHead

    def scores(self, hidden: Tensor, before: Tensor) -> Tensor:
        gain = self.own.share * self.own.bigram_gain(hidden)
        return self.target.logits(hidden) + gain * self.own.bigram_table[before]

    def __call__(
        self, hidden: Tensor, bonus: Tensor, noise: BlockNoise | None
    ) -> Tensor | SampledBlocks:
        path = [bonus]
        for place in range(1, hidden.shape[1]):
            path.append(self.scores(hidden[:, place], path[-1]).argmax(-1))
        drafted = torch.stack(path[1:], 1)
        if noise is None:
            return drafted
        # It draws nothing: a draft has the probability 1.
        certain = torch.zeros(*drafted.shape, 1)
        return SampledBlocks(torch.stack((drafted, drafted)), drafted[..., None], certain)

    def shortfall(
        self, hidden: Tensor, bonus: Tensor, ids: Tensor, noise: BlockNoise | None = None
    ) -> Tensor:
        before = torch.cat((bonus[:, None], ids[:, :-1]), 1)
        scores = self.scores(hidden[:, 1:], before)
        short = scores.amax(-1) - scores.gather(-1, ids[..., None])[..., 0]
        return short / scores.abs().amax()


OWN = {"architectures": ["BigramDraftModel"], **with_own(bigram_share=2)}
RAW = raw_config(**OWN)


@pytest.fixture
def listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(described, "HEAD_CONFIGS", (*described.HEAD_CONFIGS, BigramConfig))
    monkeypatch.setattr(heads, "HEAD_MODULES", {**heads.HEAD_MODULES, BigramConfig: BigramModule})


def test_every_head_that_is_read_has_a_network() -> None:
    assert set(described.HEAD_CONFIGS) == heads.HEAD_MODULES.keys()


def test_without_the_lists_it_is_another_workers_draft() -> None:
    with pytest.raises(UnsupportedDraft, match="architectures"):
        DraftConfig.from_dict(RAW)
    named = DraftConfig.from_dict({**RAW, "architectures": ["DFlashDraftModel"]})
    assert named.unknown_keys == ("dflash_config.bigram_share",)


@pytest.mark.usefixtures("listed")
def test_its_keys_are_read() -> None:
    config = DraftConfig.from_dict(RAW)
    assert config.head == BigramConfig(2) and config.unknown_keys == ()
    assert replace(config, head=HeadConfig()) == DraftConfig.from_dict(raw_config())
    for value, required in ((0, "positive integer"), (10, "1 to 9"), (7, "a smaller one")):
        with pytest.raises(ConfigError, match=rf"bigram_share in the draft's.*{required}"):
            DraftConfig.from_dict(raw_config(**OWN | with_own(bigram_share=value)))
    both = with_own(bigram_share=2, selector_rank=8, selector_top_k=4)
    with pytest.raises(ConfigError, match=r"bigram_share in .*beside selector_rank, of another"):
        DraftConfig.from_dict(raw_config(**OWN | both))


@pytest.mark.usefixtures("listed")
def test_it_is_loaded_and_proposes(tmp_path: Path) -> None:
    drawn = random_model(RAW)
    save_model(drawn, RAW, tmp_path, torch.float32)
    stored = load_file(tmp_path / "model.safetensors")
    assert stored[TABLE].shape == (64, 64) and stored[GAIN].shape == (1, 32)
    model = load_model(tmp_path, dtype=torch.float32)
    embed, bonus = torch.randn(64, 32), torch.randint(0, 64, (3,))
    hidden = torch.randn(3, 4, 32)
    head = model.make_head(TargetHead(lambda ids: embed[ids], lambda h: h @ embed.T))
    drafted = likeliest(head(hidden, bonus, None))
    for request in range(3):
        before = bonus[request]
        for place in range(1, 4):
            state = hidden[request, place]
            raised = 2 * (stored[GAIN] @ state) * stored[TABLE][before]
            before = (embed @ state + raised).argmax()
            assert drafted[request, place - 1] == before
    assert not torch.equal(drafted, (hidden[:, 1:] @ embed.T).argmax(-1))
    new = {TABLE: torch.zeros(64, 64)}
    check_new(model, new)
    reload(model, new)
    assert torch.equal(head(hidden, bonus, None), (hidden[:, 1:] @ embed.T).argmax(-1))


@pytest.mark.usefixtures("listed")
@pytest.mark.parametrize("name", [TABLE, GAIN])
def test_its_tensors_are_checked(name: str, tmp_path: Path) -> None:
    save_model(random_model(RAW), RAW, tmp_path, torch.float32)
    rewrite(tmp_path, lambda tensors: tensors.update({f"{TABLE}.weight": tensors.pop(TABLE)}))
    load_model(tmp_path, dtype=torch.float32)
    rewrite(tmp_path, lambda tensors: tensors.pop(f"{TABLE}.weight" if name == TABLE else name))
    with pytest.raises(ConfigError, match=f"tensor {name} of the draft: missing"):
        load_model(tmp_path, dtype=torch.float32)


@pytest.mark.usefixtures("listed")
def test_its_steps_are_recorded_and_checked() -> None:
    eager, slots = drafter_of(None, raw=raw_config(**OWN)), table()
    recorded = GraphedDrafter(eager, OpRecorder(), slots, (1, 3), ())
    check_recording(eager, recorded, slots, (1, 3))
    assert recorded.replays["propose"]

    class Wrong(TorchOps):
        def silu_mul(self, gate_up: Tensor) -> Tensor:
            half = super().silu_mul(gate_up)
            return half + 1 if half.shape[-1] == 4 else half

    model = DraftModel(eager.model.config, ops=Wrong())
    with pytest.raises(SelfCheckFailed, match="self-check: bigram"):
        check_ops(model, 4, 4)


def step_memory(raw: dict[str, Any]) -> DraftMemory:
    """The memory of draft steps of 5 requests, in float32."""
    config = DraftConfig.from_dict(raw)
    steps = StepSizes(
        options=Options().resolve(config), max_running=5, rows=6, positions=99, ranks=1,
        itemsize=4, kv=(), tagged=False, attention=CAPABILITIES["torch"], processors=1, recorded=0,
        most_waiting_steps=0, narrow=NarrowForwards(),
    )  # fmt: skip
    return draft_memory(config, steps)


@pytest.mark.usefixtures("listed")
def test_its_operations_are_timed() -> None:
    config = DraftConfig.from_dict(RAW)
    timed = parts.time_kernels(config, 3, torch.device("cpu"), torch.float32)
    assert timed["bigram"]["floor_bytes"] == 4 * 3


@pytest.mark.usefixtures("listed")
def test_its_bytes_are_counted() -> None:
    """By `inspect`, which calls what a server calls, and by check-gpu's floors."""
    plain = raw_config()
    report = found_of(TARGET, RAW)
    assert report["worker"] == "sglang-dflash" and report["draft_kind"] == "Bigram: 2"
    assert report["draft_head_bytes"] == 2 * 32
    assert report["draft_head_bytes_per_request"] == 2 * 3 * 64
    weights, floor = (
        [count(DraftConfig.from_dict(raw)) for raw in (plain, RAW)]
        for count in (draft_weight_bytes, lambda config: propose_floor(config, [9] * 5, None, 1))
    )
    assert weights[1] - weights[0] == 2 * (64 * 64 + 32)
    assert floor[1] - floor[0] == 32 + 15 * 64 + 5 * 15
    # Of 20 tokens, and of 15 drafted ones.
    less, more = step_memory(plain), step_memory(RAW)
    assert more.logits - less.logits == 15 * (1000 - 16 * 20)
    # A layer of v1 takes 432 numbers per token, fewer than a commit.
    assert less.activations < more.activations == 20 * 4 * (432 + 1000)
