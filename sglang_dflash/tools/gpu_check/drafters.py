"""A drafter with random weights, set up for a load as on a server, and its steps.

Loads without SGLang, which a GPU machine may lack.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from sglang_dflash.checkpoint.draft_config import DraftConfig
from sglang_dflash.drafting.attention.table import RequestSlots
from sglang_dflash.drafting.drafter import Drafter
from sglang_dflash.drafting.graphs import GraphedDrafter, Recorder
from sglang_dflash.drafting.groups import KVGroup
from sglang_dflash.drafting.heads.head import TargetHead
from sglang_dflash.drafting.model import DraftModel
from sglang_dflash.drafting.noise import BlockNoise, likeliest
from sglang_dflash.drafting.ops import context_table
from sglang_dflash.drafting.options import Options
from sglang_dflash.serving.gpu.backends import ATTENTION, draft_ops
from sglang_dflash.serving.start.plan import Plan

# The draft of --tiny, for any machine: all kinds of layers, a vocabulary of 512.
TINY = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
    "block_size": 4,
    "num_target_layers": 6,
    "max_position_embeddings": 4096,
    "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    "sliding_window": 64,
    "dflash_config": {"mask_token_id": 511, "target_layer_ids": [1, 3]},
}


class BenchLoad(NamedTuple):
    """A load: number of requests, committed tokens of each, and the window."""

    requests: int
    context: int
    window: int | None

    @property
    def name(self) -> str:
        return f"{self.requests}x{self.context}" + (f"w{self.window}" if self.window else "")


def random_model(config: DraftConfig, device: torch.device, dtype: torch.dtype) -> DraftModel:
    """Return a draft with random weights and the operations that a server takes on the device."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            return DraftModel(config, ops=draft_ops(device)).freeze()
    finally:
        torch.set_default_dtype(before)


def random_head(model: DraftModel) -> TargetHead:
    """Return a target's embedding, which is also its lm_head."""
    config, weight = model.config, model.fc.weight
    vocabulary = weight.new_empty(config.vocab_size, config.hidden_size).normal_(std=0.02)
    return TargetHead(lambda ids: vocabulary[ids], lambda hidden: hidden @ vocabulary.T)


@dataclass(frozen=True)
class LoadedDraft:
    """A drafter under a load: all requests have `load.context` committed tokens, whose draft K/V
    is live.

    Attributes:
        requests: target slots of the requests' tokens.
        bonus: int64 `[R]`, bonus tokens.
        targets: int64 `[R, B]`, the target's tokens.
        hidden: `[R * B, F * E]`, the target's hidden states.
        positions, slots: int64 `[R * B]`, positions and target slots of the block.
    """

    load: BenchLoad
    drafter: Drafter
    requests: RequestSlots
    bonus: Tensor
    targets: Tensor
    hidden: Tensor
    positions: Tensor
    slots: Tensor

    def phases(self) -> dict[str, Callable[[], None]]:
        """Return the phases of a step, as functions that can be repeated.

        `propose`: a proposal as it is recorded, for greedy requests; `sampled`: the same for
        sampled ones; `commit`: accept drafts and find entries for their tokens; `absorb`: project
        the hidden states of all block positions to K/V in the entries.
        """
        drafter, model, groups = self.drafter, self.drafter.model, self.drafter.groups
        block = drafter.draft_block
        ids, steps = self.targets.clone(), torch.arange(block, device=self.targets.device)
        entries = [group.cache.place(self.slots).clone() for group in groups]

        warm = torch.ones(len(self.bonus), device=self.bonus.device)
        noise = BlockNoise(self.bonus, warm, self.requests.seq_lens)
        greedy = noise._replace(temperatures=torch.zeros_like(warm))

        def propose() -> None:
            drafter.propose(self.bonus, self.requests, greedy)

        def sampled() -> None:
            drafter.propose(self.bonus, self.requests, noise)

        def commit() -> None:
            accepted = model.ops.accept(ids, self.targets)
            for group in groups:
                group.cache.place(self.slots, (steps < accepted.lengths[:, None]).flatten())

        def absorb() -> None:
            drafter.store(self.hidden, self.positions, None, entries)

        return {"propose": propose, "sampled": sampled, "commit": commit, "absorb": absorb}

    def graphed(self, recorder: Recorder, columns: int | None = None) -> GraphedDrafter:
        """Return the drafter with recorded steps for this load. `columns`: of the recorded table;
        by default those that the load reads."""
        columns = columns or self.drafter.columns(self.requests)
        table, requests = self.requests.req_to_token, (self.load.requests,)
        return GraphedDrafter(self.drafter, recorder, table, requests, (columns,))

    def step(self, drafter: Drafter | GraphedDrafter) -> Callable[[], None]:
        """Return the draft side of a whole decode step, as a server runs it."""
        ops, block = self.drafter.model.ops, self.drafter.draft_block
        steps = torch.arange(block, device=self.targets.device)

        def run() -> None:
            ids = likeliest(drafter.propose(self.bonus, self.requests))
            accepted = ops.accept(ids, self.targets)
            committed = (steps < accepted.lengths[:, None]).flatten()
            drafter.absorb(self.hidden, self.positions, self.slots, committed=committed)

        return run


def load_draft(
    model: DraftModel,
    head: TargetHead,
    load: BenchLoad,
    attention: str,
    device: torch.device,
    positions: int | None = None,
) -> LoadedDraft:
    """Make a drafter under a load, with an attention backend.

    Args:
        attention: name of the backend.
        positions: columns of the request-to-token table; by default those that the load needs.

    Raises:
        RuntimeError: tokens of the load are not live.
    """
    config = model.config
    options = Options(window=load.window).resolve(config)
    block, requests = options.verify_block, load.requests
    width = load.context + 2 * block
    plan = Plan.of_draft(model, options, attention, ATTENTION[attention], requests)
    # Slot 0 and row 0 are for padding. As in a used pool, a request's slots are not adjacent.
    slots = 1 + torch.randperm(requests * width, device=device).int().view(requests, width)
    req_to_token = torch.zeros(1 + requests, positions or width, dtype=slots.dtype, device=device)
    req_to_token[1:, :width] = slots
    rows = 1 + torch.arange(requests, device=device)
    lengths = torch.full_like(rows, load.context)
    request_slots = RequestSlots(req_to_token, rows, lengths, load.context)
    pool, columns = requests * width, req_to_token.shape[1]
    groups = plan.groups(pool, 1 + pool, requests, columns, carried=requests)
    for group in groups:
        group.cache.kv.normal_()
        _fill(group, request_slots)
        table = context_table(model.ops, request_slots, group.reach, group.cache.tags)
        check_live(table.entries)
    drafter = Drafter(model, head, groups, options)
    block_positions = lengths[:, None] + torch.arange(block, device=device)
    tokens = requests * block
    return LoadedDraft(
        load=load,
        drafter=drafter,
        requests=request_slots,
        bonus=torch.randint(config.vocab_size, (requests,), device=device),
        targets=torch.randint(config.vocab_size, (requests, block), device=device),
        hidden=torch.randn(tokens, config.target_hidden_width, device=device, dtype=model.dtype),
        positions=block_positions.flatten(),
        slots=req_to_token[rows[:, None], block_positions].long().flatten(),
    )


def check_live(entries: Tensor) -> None:
    """Raise RuntimeError unless all `entries` `[R, C]` of a table are live. The kernel would skip
    an empty one, and the time would be too good."""
    lost = int((entries < 0).sum())
    if lost:
        raise RuntimeError(f"{lost} of {entries.numel()} tokens of the load are not live")


def _fill(group: KVGroup, requests: RequestSlots) -> None:
    """Make the tokens that the group reads of every request live."""
    length, columns = requests.longest, requests.columns(group.reach)
    visible = requests.req_to_token[requests.rows, length - columns : length]
    group.cache.place(visible.long().flatten())
