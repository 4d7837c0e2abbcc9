"""Penalties, grammars, biases and custom processors of a block: at each position what SGLang's own
code makes of the logits there, in its order."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.layers.sampler import Sampler
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.sampling.penaltylib.orchestrator import BatchedPenalizerOrchestrator
from sglang.srt.sampling.sampling_batch_info import ProcessorEntry, SamplingBatchInfo
from torch import Tensor

from sglang_dflash.drafting.ops import TorchOps
from sglang_dflash.serving.step import sampling
from sglang_dflash.serving.step.penalties import BlockPenalties
from sglang_dflash.serving.step.target_tokens import TargetTokens, takes_one_token
from tests.engine.own_grammar import OwnGrammar
from tests.engine.processors import Likeliest
from tests.serving.batches import batch_of, request_of, sampling_info
from tests.serving.in_process import ONE_RANK
from tests.serving.step.test_grammar_masks import BACKEND, DIGITS, ONE, VOCAB
from tests.serving.step.test_penalty_counts import KINDS, sglangs_init

__all__ = ["sglangs_init"]

# After the newest token, 1, drafts that the grammar takes and of which it takes no more.
BLOCK = [ONE, DIGITS[2], DIGITS[2], DIGITS[4]]
PENALTIES = {"frequency_penalty": 0.3, "presence_penalty": 0.7, "repetition_penalty": 1.3}
WAYS: dict[str, dict[str, Any]] = {
    "grammar, processor": {"grammar": True, "processor": True},
    "all": {"grammar": True, "processor": True, "bias": True, **PENALTIES},
    "no processor": {"grammar": True, "bias": True, **PENALTIES},
    "no grammar": {"processor": True, "bias": True, **PENALTIES},
    "nothing": {},
}
WITHOUT = ("no grammar", "nothing")


def grammar_after(kind: str, tokens: list[int]) -> Any:
    made = BACKEND.dispatch_regex("[0-9]{5}")
    for token in tokens:
        made.accept_token(token)
    return made if kind == "xgrammar" else OwnGrammar(made)


def requests_after(names: tuple[str, ...], kind: str, output: list[int]) -> list[Any]:
    made = []
    for name in names:
        way = dict(WAYS[name])
        grammar = grammar_after(kind, output) if way.pop("grammar", False) else None
        processor = Likeliest.to_str() if way.pop("processor", False) else None
        way.pop("bias", None)
        request = request_of(
            output=output, grammar=grammar, custom_logit_processor=processor, **way
        )
        request.tokenizer = SimpleNamespace(additional_stop_token_ids=None, eos_token_id=0)
        request.eos_token_ids = {0}
        made.append(request)
    return made


def batch_after(names: tuple[str, ...], kind: str, output: list[int]) -> tuple[Any, Any]:
    """A batch of such requests behind their output; and its penalties."""
    requests = requests_after(names, kind, output)
    batch = batch_of(*requests, has_grammar=any(request.grammar for request in requests))
    counted = BatchedPenalizerOrchestrator(VOCAB, batch, KINDS)
    for token in output:
        counted.cumulate_output_tokens(torch.tensor([token] * len(names)))
    rows = [row for row, name in enumerate(names) if "processor" in WAYS[name]]
    bias = torch.zeros(len(names), VOCAB)
    for row, name in enumerate(names):
        bias[row, ::3] = 1.7 * ("bias" in WAYS[name])
    batch.sampling_info = sampling_info(
        temperatures=torch.ones(len(names), 1),
        vocab_size=VOCAB,
        is_all_greedy=True,
        penalizer_orchestrator=counted,
        logit_bias=bias,
        has_custom_logit_processor=bool(rows),
        custom_logit_processor={0: ProcessorEntry(Likeliest(), rows, torch.tensor(rows))},
        custom_params=[None] * len(names),
    ).copy_for_forward()
    return batch, counted


def plain(names: tuple[str, ...], kind: str, output: list[int], logits: Tensor) -> Tensor:
    """SGLang's logits `[R, V]` in a plain decoding step, by its own code."""
    batch, _ = batch_after(names, kind, output)
    info: SamplingBatchInfo = batch.sampling_info
    info.grammars = [request.grammar for request in batch.reqs] if batch.has_grammar else None
    adjusted = LogitsProcessorOutput(next_token_logits=logits.clone())
    runner, sampler = SimpleNamespace(), SimpleNamespace()
    ModelRunner._preprocess_logits(runner, adjusted, info)
    return Sampler._preprocess_logits(sampler, adjusted.next_token_logits, info)


@pytest.mark.parametrize("kind", ["xgrammar", "own"])
@pytest.mark.parametrize("width", [1, len(BLOCK)])
@pytest.mark.parametrize("names", [tuple(WAYS), *((name,) for name in WAYS)], ids=str)
def test_every_position_has_sglangs_logits(names: tuple[str, ...], width: int, kind: str) -> None:
    rows, newest = len(names), BLOCK[:1]
    batch, counted = batch_after(names, kind, newest)
    logits = 9 * torch.randn(rows, width, VOCAB, generator=torch.Generator().manual_seed(0))
    # What a processor would keep, and a grammar never allows.
    logits[:, :, 7] = 99.0
    block = torch.tensor([BLOCK[:width]] * rows)
    penalties = BlockPenalties(rows, len(BLOCK), torch.device("cpu"), TorchOps())
    penalties.begin(counted)
    masks = sampling.prepare_grammar_masks(batch, block, lambda: None)
    got = LogitsProcessorOutput(next_token_logits=logits.clone().flatten(0, 1))
    with torch.compiler.set_stance("force_eager"):
        tokens = TargetTokens(SGLANGS_SAMPLER, sampling.Ranks(ONE_RANK), penalties)(
            batch, got, block, block, masks
        )
        by_position = got.next_token_logits.view(rows, width, VOCAB)
        for position in range(width):
            output = BLOCK[: position + 1]
            wanted = plain(names, kind, output, logits[:, position])
            for row, request in enumerate(batch.reqs):
                if position == 0 or not takes_one_token(request):
                    torch.testing.assert_close(
                        by_position[row, position], wanted[row], rtol=0, atol=0
                    )
                    assert tokens[row, position] == wanted[row].argmax()
    for row, name in enumerate(names):
        assert name in WITHOUT or tokens[row, 0] in DIGITS


SGLANGS_SAMPLER = SimpleNamespace(_sync_token_ids_across_tp=lambda *_: None)
