"""Masks of grammars at the positions of a block, in a batch of grammars that can look ahead, of
some that cannot, and of none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sglang.srt.constrained.reasoner_grammar_backend import ReasonerGrammarObject
from sglang.srt.constrained.xgrammar_backend import XGrammarGrammarBackend
from sglang.srt.speculative.spec_utils import GrammarTree, build_grammar_vocab_mask
from sglang.srt.utils.hf_transformers_utils import get_tokenizer
from torch import Tensor

from sglang_dflash.serving.step import sampling
from sglang_dflash.serving.step.target_tokens import takes_one_token
from sglang_dflash.tools.demo_pairs.pairs import demo_pair
from tests.engine.own_grammar import OwnGrammar
from tests.serving.batches import batch_of, request_of, sampling_info

TOKENIZER = get_tokenizer(str(demo_pair("dense").target))
VOCAB = 1024
BACKEND = XGrammarGrammarBackend(TOKENIZER, VOCAB, [TOKENIZER.eos_token_id])
DIGITS = [token for token in range(VOCAB) if TOKENIZER.decode([token]).isdecimal()]
# A digit, then two drafts of which the grammar takes the first, and one more.
ONE, X = TOKENIZER.encode("1")[0], TOKENIZER.encode("x")[0]
BLOCK = torch.tensor([[ONE, ONE, X, ONE]] * 3)


def three_digits() -> Any:
    """XGrammar's grammar, which has read the block's first token."""
    grammar = BACKEND.dispatch_regex("[0-9]{3}")
    grammar.accept_token(ONE)
    return grammar


def batch_with(*grammars: Any) -> Any:
    info = sampling_info(temperatures=torch.ones(len(grammars), 1), vocab_size=VOCAB)
    info.grammar_mask = "a prefill's"
    requests = (request_of(grammar=grammar) for grammar in grammars)
    return batch_of(*requests, has_grammar=True, sampling_info=info)


def allowed(logits: Tensor) -> list[int]:
    return logits.isfinite().nonzero()[:, 0].tolist()


def test_each_grammar_is_applied_where_it_is_known() -> None:
    called: list[None] = []
    batch = batch_with(OwnGrammar(three_digits()), three_digits(), None)
    make = sampling.prepare_grammar_masks(batch, BLOCK, lambda: called.append(None))
    assert not called
    masks, logits = make(), torch.zeros(12, VOCAB)
    assert called == [None] and batch.sampling_info.grammar_mask is None
    assert masks is not None
    masks.apply(logits)
    own, ahead, free = logits.view(3, 4, VOCAB)
    assert allowed(own[0]) == DIGITS and own[1:].isfinite().all()
    # After a draft that it does not take, nothing is forbidden: none is accepted.
    assert [allowed(row) == DIGITS for row in ahead] == [True, True, False, False]
    assert free.isfinite().all()
    assert [takes_one_token(request) for request in batch.reqs] == [True, False, False]


def test_sglang_looks_ahead_with_any_grammar() -> None:
    """It reads bools as packed bits: the draft that the grammar takes counts as one that it does
    not, and anything may follow."""
    batch, logits = batch_with(OwnGrammar(three_digits())), torch.zeros(4, VOCAB)
    tree = GrammarTree.from_linear_chain(BLOCK[:1])
    mask = build_grammar_vocab_mask(
        reqs=batch.reqs, tree=tree, sampling_info=batch.sampling_info, device="cpu", barrier=None
    )
    assert mask is not None
    mask.apply(logits)
    assert [allowed(row) == DIGITS for row in logits] == [True, False, False, False]


def test_sglang_takes_a_token_back_of_any_grammar() -> None:
    with pytest.raises(NotImplementedError):
        OwnGrammar(three_digits()).rollback(1)


def test_a_thought_looks_ahead_if_what_follows_it_does() -> None:
    def thought(grammar: Any) -> Any:
        made = ReasonerGrammarObject(grammar, [5], apply_vocab_mask_fn=BACKEND.apply_vocab_mask)
        made.maybe_init_reasoning(True)
        return made

    assert sampling.looks_ahead(thought(three_digits())) and sampling.looks_ahead(thought(None))
    assert not sampling.looks_ahead(thought(OwnGrammar(three_digits())))
    assert not sampling.looks_ahead(OwnGrammar(three_digits()))

    class Derived(type(three_digits())):  # type: ignore[misc]
        pass

    assert sampling.looks_ahead(Derived.__new__(Derived))
