"""Our worker without a server: its drafter is real, SGLang's batch and the target are made up."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from torch import Tensor

from sglang_dflash.drafting.acceptance import accept
from sglang_dflash.drafting.drafter import Drafter
from sglang_dflash.drafting.groups import KVGroup
from sglang_dflash.drafting.heads.head import TargetHead
from sglang_dflash.drafting.lookup import Lookup
from sglang_dflash.drafting.model import DraftModel
from sglang_dflash.drafting.options import MOST_WAITING_STEPS, Finding, Options
from sglang_dflash.drafting.parallel import TensorParallel
from sglang_dflash.drafting.width import WidthPolicy
from sglang_dflash.serving.kv_transfer.disaggregation import DraftKVPages
from sglang_dflash.serving.kv_transfer.host_tier import HostTier
from sglang_dflash.serving.metrics.figures import Figures
from sglang_dflash.serving.step.batch import GenerationBatchResult, draft_input
from sglang_dflash.serving.step.penalties import BlockPenalties
from sglang_dflash.serving.step.sampling import Ranks
from sglang_dflash.serving.step.seeds import Seeds
from sglang_dflash.serving.step.step import StepObserver
from sglang_dflash.serving.step.target_forward import TargetForward
from sglang_dflash.serving.step.target_tokens import TargetTokens
from sglang_dflash.serving.step.width import StepClock, StepWidths
from sglang_dflash.serving.step.worker import DFlashWorker
from tests.conftest import kv_groups, random_model, raw_config
from tests.serving.batches import batch_of, request_of

RAW = raw_config()
VOCAB, HIDDEN = RAW["vocab_size"], RAW["hidden_size"]
# Two requests, with the columns of their rows in the request-to-token table.
ROWS, COLUMNS, SLOTS = 3, 24, 100
ONE_RANK: Any = SimpleNamespace(world_size=1, rank_in_group=0)


class Target:
    """SGLang's target worker: random logits and hidden states, with rows of padding behind them."""

    def __init__(self, features: int, device: str, padding: int = 0) -> None:
        self.features, self.device, self.padding = features, device, padding
        self.extra: dict[str, Any] = {}
        self.model_runner: Any = None
        self.on_launch: Callable[[], None] = lambda: None
        self.output: Any = None
        self.last: Any = None

    def forward_batch_generation(
        self, batch: Any, forward_batch: Any = None, **_: Any
    ) -> GenerationBatchResult:
        self.on_launch()
        tokens = forward_batch.tokens if batch is None else sum(batch.extend_lens)
        rows = tokens if batch is None else len(batch.extend_lens)
        logits = torch.randn(rows, VOCAB, device=self.device)
        hidden = torch.randn(tokens + self.padding, self.features, device=self.device)
        hidden[tokens:] = float("nan")
        self.last = torch.randn(tokens + self.padding, HIDDEN, device=self.device)
        self.output = LogitsProcessorOutput(
            next_token_logits=logits, hidden_states=hidden, last_hidden_states=self.last
        )
        result = GenerationBatchResult(logits_output=self.output, **self.extra)
        if batch is not None:
            result.next_token_ids = logits.argmax(-1)
        return result


def drafter_of(model: DraftModel, groups: Sequence[KVGroup], options: Any, device: str) -> Drafter:
    embedding = torch.randn(VOCAB, HIDDEN, device=device)
    head = TargetHead(lambda ids: embedding[ids], lambda x: x @ embedding.T)
    return Drafter(model, head, groups, options)


def widths_of(policy: WidthPolicy, tp: TensorParallel | None = None) -> StepWidths:
    """A chooser of widths, by the host's clock."""
    return StepWidths(policy, tp or TensorParallel(), StepClock(torch.device("cpu")))


def worker_of(
    window: int | None = None,
    device: str = "cpu",
    entries: int = 60,
    padding: int = 0,
    group: Any = ONE_RANK,
    sampler: Any = None,
    rollback: Any = None,
    dtype: torch.dtype = torch.float32,
    widths: StepWidths | None = None,
    labels: Mapping[str, Any] | None = None,
    looks_up: bool = False,
    verify_block: int | None = None,
    most_waiting_steps: int = MOST_WAITING_STEPS,
    warnings: Sequence[Finding] = (),
    hierarchical: bool = False,
) -> Any:
    """A worker for a draft of random weights. With a window, the draft KV cache is a ring of
    `entries`; its K/V is of `dtype`. `labels`: of its series in /metrics, if it has any.
    `verify_block`: None for that of the draft."""
    with torch.device(device):
        model = random_model(RAW).freeze()
    asked = Options(window=window, looks_up=looks_up, verify_block=verify_block)
    options = asked.resolve(model.config)
    groups = kv_groups(model, options, SLOTS, entries, dtype=dtype, tagged=hierarchical)
    drafter = drafter_of(model, groups, options, device)
    block, ranks = options.verify_block, Ranks(group)
    widths = widths or widths_of(WidthPolicy(block))
    penalties = BlockPenalties(ROWS, block, torch.device(device), model.ops)
    table = torch.arange(ROWS * COLUMNS, device=device).view(ROWS, COLUMNS).int() + 1
    lookup = Lookup(table, model.ops, block, VOCAB, drafter.counters) if looks_up else None
    target: Any = Target(model.config.target_hidden_width, device, padding)
    figures = Figures(
        worker="", attention="torch", memory={}, context_length=COLUMNS,
        simulated=None, model=model, options=options, drafter=drafter, lookup=lookup,
        rollback=rollback, policy=widths.policy, width_steps=widths.steps, labels=labels,
        warnings=warnings, pages=DraftKVPages(groups),
    )  # fmt: skip
    worker: Any = DFlashWorker(
        verify_block=block, carried=2,
        req_to_token=table, widths=widths, drafter=drafter,
        target_forward=TargetForward(target), target_tokens=TargetTokens(sampler, ranks, penalties),
        accept=accept, rollback=rollback, ranks=ranks, lookup=lookup,
        host_tier=HostTier(groups, 2) if hierarchical else None,
        most_waiting_steps=most_waiting_steps, seeds=Seeds(ROWS, 0, table.device),
        figures=figures, observer=StepObserver(),
    )  # fmt: skip
    # For tests to change.
    worker.target_worker = target
    return worker


def prefill_of(prefixes: Sequence[int], lengths: Sequence[int], device: str = "cpu") -> Any:
    """A prefill of requests in rows 1, 2, ...: `lengths` tokens, of which `prefixes` are cached."""
    return batch_of(
        *(request_of(str(row), [7] * n) for row, n in enumerate(lengths)),
        device=device,
        forward_mode=ForwardMode.EXTEND,
        prefix_lens=list(prefixes),
        extend_lens=[n - prefix for prefix, n in zip(prefixes, lengths, strict=True)],
        req_pool_indices=torch.arange(1, len(lengths) + 1, device=device),
        # As the worker's table has them.
        out_cache_loc=torch.cat(
            [
                torch.arange(prefix, n, device=device) + row * COLUMNS + 1
                for row, (prefix, n) in enumerate(zip(prefixes, lengths, strict=True), 1)
            ]
        ),
        seq_lens=torch.tensor(lengths).to(device),
    )


def decode_of(lengths: Sequence[int], device: str = "cpu", **changes: Any) -> Any:
    """A decode step of requests in rows 1, 2, ... with that many committed tokens."""
    seq_lens = torch.tensor(lengths)
    bonus = torch.full((len(lengths),), 5, device=device)
    given = draft_input(bonus, seq_lens.to(device), in_flight=1)
    batch = batch_of(
        *(request_of(str(row)) for row in range(len(lengths))),
        device=device,
        forward_mode=ForwardMode.DECODE,
        req_pool_indices=torch.arange(1, len(lengths) + 1, device=device),
        seq_lens=seq_lens.to(device),
        seq_lens_cpu=seq_lens,
        seq_lens_sum=sum(lengths),
        spec_info=given,
    )
    return replace(batch, **changes)


def prepared(verify_input: Any, batch: Any, _worker: Any) -> tuple[Any, bool]:
    """Stand-in for `DFlashVerifyInput.prepare_for_verify`, which leaves the batch so too."""
    batch.spec_info, batch.forward_mode = verify_input, ForwardMode.TARGET_VERIFY
    return SimpleNamespace(tokens=len(verify_input.draft_token)), False


def filled(worker: Any, lengths: Sequence[int]) -> Any:
    """The worker, after the prefill of requests of these lengths."""
    worker.forward_batch_generation(
        prefill_of([0] * len(lengths), lengths, str(worker.req_to_token.device))
    )
    return worker


def draft_kv(worker: Any, slots: Tensor) -> Tensor:
    """K/V of target slots, NaN for those that are not live."""
    (group,) = worker.drafter.groups
    entries, live = group.cache.find(slots)
    return group.cache.kv[entries].masked_fill(~live[:, None, None, None, None], float("nan"))
