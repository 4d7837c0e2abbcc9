"""All decisions about a server's drafter, in one value: it tells the sizing the bytes, builds the
caches with their attention, and checks them. No SGLang here."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from sglang_dflash.checkpoint.draft_config import LayerGroup
from sglang_dflash.common.log import Log
from sglang_dflash.drafting.attention.backend import AttentionSizes, Backend, processors_of
from sglang_dflash.drafting.attention.capabilities import AttentionLoad
from sglang_dflash.drafting.attention.reference import TorchAttention
from sglang_dflash.drafting.graphs import Recorder
from sglang_dflash.drafting.groups import KVGroup
from sglang_dflash.drafting.kv import DraftKVCache
from sglang_dflash.drafting.kv.ring import RingKVCache
from sglang_dflash.drafting.kv.tagged import TaggedKVCache
from sglang_dflash.drafting.model import DraftModel
from sglang_dflash.drafting.options import MOST_WAITING_STEPS, Finding, ResolvedOptions
from sglang_dflash.drafting.self_check import check_attention, check_ops
from sglang_dflash.drafting.width import WidthPolicy
from sglang_dflash.memory.draft_memory import NarrowForwards, StepSizes
from sglang_dflash.memory.sizes import GroupKVSize, draft_kv
from sglang_dflash.serving.step.extension import Extension

if TYPE_CHECKING:
    from sglang_dflash.serving.hybrid.rollback import Rollback

logger = Log(__name__)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Made once, when SGLang constructs its worker (`start.decide`). The draft is loaded by then.

    Nothing has a default: a new field is to be decided for a server.

    Attributes:
        policy: chooses verify widths.
        backend: the draft attention backend.
        kv_dtype: the dtype of draft K/V.
        max_running: --max-running-requests; 1 on a prefill server.
        arriving: requests whose prompts come from other servers, which have rows of SGLang's
            request-to-token table beside the `max_running`.
        disaggregated: whether draft K/V of prompts goes to another server, page by page as the
            target's.
        hierarchical: whether cached prefixes go to host memory and come back.
        attention: the name of `backend`.
        recorder: creates the `Recorder` of draft steps; None if they run eagerly.
        rollback: of recurrent layers; None without any, or if the server verifies nothing.
        is_checked: whether kernels and recorded steps are compared with torch.
        extension: an experiment's parts.
        load_seconds: the time that loading the draft took.
    """

    model: DraftModel
    options: ResolvedOptions
    policy: WidthPolicy
    backend: Backend
    device: torch.device
    kv_dtype: torch.dtype
    max_running: int
    arriving: int
    disaggregated: bool
    hierarchical: bool
    attention: str
    recorder: Callable[[], Recorder] | None
    rollback: Rollback | None
    is_checked: bool
    extension: Extension
    load_seconds: float

    @classmethod
    def of_draft(
        cls,
        model: DraftModel,
        options: ResolvedOptions,
        attention: str,
        backend: Backend,
        max_running: int,
    ) -> Plan:
        """The plan of a draft without a server, as tools check and time it: on one rank, with the
        whole block, unrecorded, with draft K/V of the model's device and dtype."""
        return cls(
            model=model,
            options=options,
            policy=WidthPolicy(options.verify_block),
            backend=backend,
            device=model.norm.weight.device,
            kv_dtype=model.dtype,
            max_running=max_running,
            arriving=0,
            disaggregated=False,
            hierarchical=False,
            attention=attention,
            recorder=None,
            rollback=None,
            is_checked=True,
            extension=Extension(),
            load_seconds=0.0,
        )

    def of_prompts(self) -> Plan:
        """The plan of a prefill server, which drafts and verifies nothing: what serves draft steps
        is made for one request, so that the self-check is as elsewhere."""
        return replace(
            self,
            options=replace(self.options, looks_up=False),
            policy=WidthPolicy(self.options.verify_block),
            max_running=1,
            recorder=None,
            rollback=None,
        )

    @property
    def layer_groups(self) -> tuple[LayerGroup, ...]:
        return self.model.config.groups(self.options.reach)

    @property
    def most_waiting_steps(self) -> int:
        """Most plain steps whose hidden states wait to be absorbed. With disaggregation they are
        absorbed at once: another server may write those slots before the states are absorbed."""
        return 1 if self.disaggregated else MOST_WAITING_STEPS

    def warnings(self, names: Mapping[str, str]) -> list[Finding]:
        """Return findings about settings that are served but probably a mistake; `names`: setting
        -> what the user types for it."""
        is_fixed = len(self.policy.widths) == 1
        return self.options.warnings(self.model.config, names, is_fixed)

    def draft_kv(self, carried: int) -> tuple[GroupKVSize, ...]:
        """Return the draft K/V of each of `layer_groups`, whose rings are for so many requests."""
        return draft_kv(
            self.model.config,
            self.options,
            carried,
            itemsize=self.kv_dtype.itemsize,
            ranks=self.model.tp.size,
            hierarchical=self.hierarchical,
            disaggregated=self.disaggregated,
        )

    def step_sizes(self, positions: int, recorded: int, narrow: NarrowForwards) -> StepSizes:
        """The sizes of draft steps, of which their memory is computed.

        Args:
            positions: of a row of the request-to-token table.
            recorded: requests of the largest recorded batch; 0 if no steps are recorded.
            narrow: the target's forwards of narrower widths, which draft nothing.
        """
        return StepSizes(
            options=self.options,
            max_running=self.max_running,
            rows=self.max_running + self.arriving + 1,
            positions=positions,
            ranks=self.model.tp.size,
            itemsize=self.model.dtype.itemsize,
            kv=self.draft_kv(self.max_running),
            tagged=self.hierarchical,
            attention=self.backend.capabilities,
            processors=processors_of(self.device),
            recorded=recorded,
            most_waiting_steps=self.most_waiting_steps if narrow.widths else 0,
            narrow=narrow,
        )

    def groups(
        self,
        kv_tokens: int,
        target_slots: int,
        admitted: int,
        positions: int,
        carried: int,
    ) -> tuple[KVGroup, ...]:
        """The draft KV caches beside a target pool, with attention over them.

        Args:
            kv_tokens: of the pool.
            target_slots: of the pool, its padding included.
            admitted: requests that SGLang's sized pools admit at a time.
            positions: of a row of SGLang's request-to-token table.
            carried: requests that the rings are for.
        """
        per_slot = TaggedKVCache if self.hierarchical else DraftKVCache
        scratch = admitted * self.options.draft_block if self.backend.capabilities.scratch else 0
        groups, sized = [], self.draft_kv(carried)
        part = self.model.config.of_rank(self.model.tp.size)
        for layer_group, kv in zip(self.layer_groups, sized, strict=True):
            shape = layer_group.kv_shape(self.model.kv_shape)
            of_cache = shape, self.kv_dtype, self.device, scratch
            entries = kv.entries(kv_tokens)
            cache = per_slot(target_slots, *of_cache) if entries is None else (
                RingKVCache(entries, target_slots, *of_cache, self.model.ops.place_in_ring)
            )  # fmt: skip
            load = AttentionLoad(
                part,
                self.options.draft_block,
                requests=admitted,
                columns=layer_group.reach.tokens_read(positions),
                processors=processors_of(self.device),
            )
            sizes = AttentionSizes(
                load,
                self.device,
                layer_group.attentions,
                scratch=cache.num_entries + 1,
                holes=cache.has_holes,
            )
            groups.append(KVGroup(layer_group, cache, self.backend.make(sizes)))
        return tuple(groups)

    def check(self, groups: Sequence[KVGroup], admitted: int) -> None:
        """Compare operations and attention with torch's, if they are not torch's.

        Args:
            groups: with empty caches; the attention may keep K/V at their ends.
            admitted: requests that the groups were made for.

        Raises:
            SelfCheckFailed: one of them differs.
        """
        began, block = time.perf_counter(), self.options.draft_block
        with torch.no_grad():
            checked = check_ops(self.model, block, self.options.verify_block)
            for group in groups:
                if not isinstance(group.attention, TorchAttention):
                    check_attention(self.model, block, group, admitted)
                    checked.append(type(group.attention).__name__)
        if checked:
            milliseconds = 1000 * (time.perf_counter() - began)
            names = ", ".join(checked)
            logger.info("self-check: as torch in %.0f ms: %s", milliseconds, names)
