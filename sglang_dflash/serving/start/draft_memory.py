"""Memory of the drafter beside its weights and the K/V of tokens: computed before SGLang sizes the
KV pools, which leave it free."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from sglang_dflash.drafting.attention.backend import Setting
from sglang_dflash.drafting.plain_context import MOST_STEPS
from sglang_dflash.drafting.step_memory import StepShape
from sglang_dflash.serving.gpu.graphs import largest_recorded
from sglang_dflash.serving.hybrid.rollback import Rollback, recording_bytes
from sglang_dflash.serving.start.draft_setup import DraftSetup
from sglang_dflash.serving.start.memory import MemoryPlan, table_positions
from sglang_dflash.serving.start.narrow_widths import narrow_width_bytes

logger = logging.getLogger(__name__)

# Of a bounded draft KV cache: which entry a target slot has.
BYTES_PER_TARGET_SLOT = 4


class DraftMemory(NamedTuple):
    """Bytes, at most.

    Attributes:
        scratch_kv: entries that attention keeps the block's own K/V in.
        slot_tables: tags of a bounded draft KV cache, without those per target slot, and a step's
            table of entries.
        attention_workspace: of draft attention, such as parts of split requests.
        graph_buffers: what recorded steps read and write; 0 if none are recorded.
        logits: of all drafted positions of the largest batch.
        activations: of the draft network for the largest batch.
        waiting_hidden: hidden states of plain steps that the drafter has not absorbed; 0 if every
            step drafts.
        recurrent_inputs: what replay keeps of a verify forward; 0 without recurrent layers.
        narrow_widths: attention backends and CUDA graphs of the target for other widths than the
            block's; 0 on a CPU.
    """

    scratch_kv: int = 0
    slot_tables: int = 0
    attention_workspace: int = 0
    graph_buffers: int = 0
    logits: int = 0
    activations: int = 0
    waiting_hidden: int = 0
    recurrent_inputs: int = 0
    narrow_widths: int = 0

    @property
    def total(self) -> int:
        return sum(self)

    def after_graphs(self, recorded: bool) -> int:
        """Bytes that are not allocated yet when SGLang has captured its graphs, and recorded steps
        of ours hold theirs. What has waited is absorbed by an eager step."""
        if not recorded:
            return self.waiting_hidden + self.logits + self.activations
        return self.waiting_hidden + (self.activations if self.waiting_hidden else 0)

    def __str__(self) -> str:
        parts = {name: n for name, n in self._asdict().items() if n}
        shown = ", ".join(f"{name.replace('_', ' ')} {_mib(n)}" for name, n in parts.items())
        return f"{_mib(self.total)} MiB ({shown})"


def draft_memory(
    setup: DraftSetup,
    positions: int,
    recorded: int,
    recurrent_inputs: int = 0,
    narrow: bool = False,
    narrow_widths: int = 0,
) -> DraftMemory:
    """What a server needs.

    Args:
        positions: of a row of the request-to-token table.
        recorded: requests of the largest recorded batch; 0 if no steps are recorded.
        recurrent_inputs, narrow_widths: bytes, see `DraftMemory`.
        narrow: whether there are steps that draft nothing.
    """
    options, config, requests = setup.options, setup.model.config, setup.running
    block, reach = options.block_size, options.reach
    columns = reach.of(positions)
    sorts = setup.backend.capabilities.scratch
    setting = Setting(block, setup.device, reach, tp=setup.tp, requests=requests, columns=columns)
    per_token = math.prod(setup.model.kv_shape) * setup.kv_dtype.itemsize
    step = StepShape(
        config, block, requests, columns, options.draft_kv_entries(requests),
        setup.model.fc.weight.element_size(), setup.tp.size, sorts, MOST_STEPS if narrow else 0,
    )  # fmt: skip
    return DraftMemory(
        scratch_kv=(1 + requests * block * sorts) * per_token,
        slot_tables=step.slot_tables,
        attention_workspace=setup.backend.workspace(config, setting),
        graph_buffers=step.graph_buffers(recorded),
        logits=step.logits,
        activations=step.activations,
        waiting_hidden=step.waiting_hidden,
        recurrent_inputs=recurrent_inputs,
        narrow_widths=narrow_widths,
    )


def plan_memory(
    setup: DraftSetup,
    model_config: Any,
    draft_graphs: str,
    rollback: Rollback | None,
    widths: Sequence[int] = (),
) -> tuple[MemoryPlan, DraftMemory]:
    """What a server's sizing is to know, and what it leaves free for. One log line.

    Args:
        model_config: SGLang's, of the target.
        draft_graphs: the value of --speculative-dflash-draft-graphs.
        rollback: of recurrent layers; None without them.
        widths: verify widths below the block size.
    """
    capturable = setup.backend.capabilities.capturable
    recorded = largest_recorded(draft_graphs, setup.device, capturable, setup.running)
    replay = rollback is not None and rollback.name == "replay"
    itemsize = setup.model.fc.weight.element_size()
    inputs = 0
    if replay:
        inputs = recording_bytes(model_config, setup.running, setup.options.block_size, itemsize)
    positions = table_positions(model_config.context_len)
    by_width = narrow_width_bytes(
        widths, setup.device, model_config, setup.running,
        setup.model.config.target_hidden_width, itemsize,
    )  # fmt: skip
    needed = draft_memory(setup, positions, recorded, inputs, bool(widths), by_width)
    logger.info("DFLASH: reserved beside draft K/V, before the KV pools are sized: %s", needed)
    entries = setup.options.draft_kv_entries(setup.running)
    token_bytes = math.prod(setup.model.kv_shape) * setup.kv_dtype.itemsize
    plan = MemoryPlan(
        bounded_draft_kv_bytes=None if entries is None else entries * token_bytes,
        replay=replay,
        reserved_bytes=needed.total,
        later_bytes=needed.after_graphs(recorded > 0),
        target_slot_bytes=0 if entries is None else BYTES_PER_TARGET_SLOT,
    )
    return plan, needed


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f}"
