"""Two tenants on one in-process worker: slots that are freed go to the other one at once.

Everything that the target computes of a token depends on its request and position only, so a
request's outputs and drafts must be those that it has by itself.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from torch import Tensor

from sglang_dflash.drafting.draft_source import CLASSES, DRAFT
from sglang_dflash.serving.step.batch import GenerationBatchResult
from tests.serving.batches import request_of
from tests.serving.in_process import COLUMNS, ROWS, SLOTS, VOCAB, decode_of, prefill_of, worker_of

FEW = 2


def noise(*key: int, size: int) -> Tensor:
    """Values that depend on the key only."""
    seed = sum(value * 7919**i for i, value in enumerate(key, 1)) % 2**31
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def fix_the_choice(lookup: Any) -> None:
    """Let the choice between the draft and lookup depend on the match only, as after a poor draft.
    It learns from all requests otherwise."""
    source, learn = lookup._source, lookup.learn
    source.totals[1, DRAFT, CLASSES] *= 0.1
    totals = source.totals.clone()

    def count_only(accepted: Any) -> None:
        learn(accepted)
        source.totals.copy_(totals)

    lookup.learn = count_only


class SecretTarget:
    """SGLang's target worker: hidden states and tokens are functions of request and position.

    The target agrees with some drafts, so that blocks are accepted to every length.
    """

    def __init__(self, features: int, tokens: int) -> None:
        """`tokens`: how many different ones it answers."""
        self.features, self.tokens = features, tokens
        # Row of the request-to-token table -> request.
        self.requests: dict[int, int] = {}
        # Requests whose hidden states are NaN.
        self.broken: set[int] = set()

    def forward_batch_generation(
        self, batch: Any, forward_batch: Any = None, **_: Any
    ) -> GenerationBatchResult:
        given = batch if forward_batch is None else forward_batch
        rows = [self.requests[row] for row in given.req_pool_indices.tolist()]
        if forward_batch is None:
            ends = [p + n for p, n in zip(batch.prefix_lens, batch.extend_lens, strict=True)]
            spans = [range(p, end) for p, end in zip(batch.prefix_lens, ends, strict=True)]
        else:
            block = forward_batch.positions.view(len(rows), -1)
            spans = [range(int(row[0]), int(row[-1]) + 1) for row in block]
        hidden = torch.stack(
            [
                self.hidden(request, position)
                for request, span in zip(rows, spans, strict=True)
                for position in span
            ]
        )
        if forward_batch is None:
            tokens = torch.tensor([self.token(r, s.stop) for r, s in zip(rows, spans, strict=True)])
        else:
            drafted = forward_batch.drafts.view(len(rows), -1)
            tokens = torch.tensor(
                [
                    self.answer(request, position, drafted[row][at + 1 :])
                    for row, (request, span) in enumerate(zip(rows, spans, strict=True))
                    for at, position in enumerate(span)
                ]
            )
        logits = torch.nn.functional.one_hot(tokens, VOCAB).float()
        output = LogitsProcessorOutput(next_token_logits=logits, hidden_states=hidden)
        result = GenerationBatchResult(logits_output=output)
        result.next_token_ids = tokens
        return result

    def hidden(self, request: int, position: int) -> Tensor:
        if request in self.broken:
            return torch.full((self.features,), float("nan"))
        return noise(request, position, size=self.features) + request

    def token(self, request: int, position: int) -> int:
        return (31 * request + 17 * position) % self.tokens

    def answer(self, request: int, position: int, drafts: Tensor) -> int:
        """The token after `position`, for which the first of the `drafts` was proposed, if any."""
        agrees = (7 * request + position**2) % 5 > 1 and len(drafts) > 0
        return int(drafts[0]) if agrees else self.token(request, position + 1)


def prepared(verify_input: Any, batch: Any, _worker: Any) -> tuple[Any, bool]:
    """Stand-in for `DFlashVerifyInput.prepare_for_verify`."""
    batch.forward_mode = ForwardMode.TARGET_VERIFY
    return SimpleNamespace(
        req_pool_indices=batch.req_pool_indices,
        positions=verify_input.positions,
        drafts=verify_input.draft_token,
    ), False


@dataclass
class Request:
    """A request and what came of it.

    Attributes:
        number: decides everything that the target computes of it.
        prompt: tokens.
        steps: decode steps before it ends.
        outputs: committed tokens.
        drafts: what was proposed, step by step.
    """

    number: int
    prompt: int
    steps: int
    outputs: list[int] = field(default_factory=list)
    drafts: list[list[int]] = field(default_factory=list)
    length: int = 0


class Served:
    """A worker whose requests come and go. Free slots are used again last in, first out."""

    def __init__(self, window: int | None, looks_up: bool = False) -> None:
        torch.manual_seed(5)
        self.worker = worker_of(window, entries=90, looks_up=looks_up)
        # With few, texts repeat parts of themselves.
        tokens = FEW if looks_up else VOCAB - 1
        if looks_up:
            fix_the_choice(self.worker.lookup)
        self.target = SecretTarget(self.worker.target_worker.features, tokens)
        self.worker.target_worker.forward_batch_generation = self.target.forward_batch_generation
        self.table = self.worker.req_to_token
        self.free = list(range(1, SLOTS))
        self.running: dict[int, Request] = {}

        def watched(block: Tensor) -> Tensor:
            for row, drafts in zip(sorted(self.running), block.tolist(), strict=True):
                self.running[row].drafts.append(drafts)
            return block

        self.worker.ranks.drafts = watched

    def start(self, row: int, request: Request) -> None:
        """Prefill it in that row of the table."""
        slots = [self.free.pop() for _ in range(COLUMNS)]
        self.table[row] = torch.tensor(slots, dtype=self.table.dtype)
        self.running[row], self.target.requests[row] = request, request.number
        batch = prefill_of([0], [request.prompt])
        batch.req_pool_indices = torch.tensor([row])
        order = random.Random(request.number)
        tokens = [order.randrange(FEW) for _ in range(request.prompt)]
        batch.reqs = [request_of(prompt=tokens)]
        result = self.worker.forward_batch_generation(batch)
        request.length = request.prompt
        request.outputs.append(int(result.next_token_ids))

    def step(self) -> None:
        """One decode step of all running requests."""
        rows = sorted(self.running)
        batch = decode_of([self.running[row].length for row in rows])
        batch.req_pool_indices = torch.tensor(rows)
        batch.spec_info.bonus_tokens = torch.tensor([self.running[r].outputs[-1] for r in rows])
        result = self.worker.forward_batch_generation(batch)
        tokens = result.next_token_ids.view(len(rows), -1).tolist()
        for row, kept, count in zip(rows, tokens, result.accept_lens.tolist(), strict=True):
            self.running[row].outputs += kept[:count]
            self.running[row].length += count

    def end(self, row: int) -> None:
        """Free its slots, and poison what the draft KV cache has of them. Its text stays, as that
        of a request in another row does."""
        del self.running[row]
        slots = self.table[row].long()
        for group in self.worker.drafter.groups:
            entries, live = group.cache.find(slots)
            group.cache.kv[entries[live]] = float("nan")
        self.free += slots.tolist()

    def run(self, queues: Sequence[Sequence[Request]]) -> None:
        """Serve each queue in a row of its own, one request after another."""
        waiting = {row: list(queue) for row, queue in enumerate(queues, 1)}
        assert len(waiting) < ROWS
        left: dict[int, int] = {}
        while waiting or self.running:
            for row in list(waiting):
                if row in self.running:
                    continue
                if not waiting[row]:
                    del waiting[row]
                    continue
                request = waiting[row].pop(0)
                left[row] = request.steps
                self.start(row, request)
            if self.running:
                self.step()
            for row in list(self.running):
                left[row] -= 1
                if left[row] == 0:
                    self.end(row)

    def nonfinite(self) -> int:
        """Outputs of the draft that were NaN: it has read what it must not."""
        self.worker.drafter.counters.send()
        return self.worker.drafter.counters.read().nonfinite
