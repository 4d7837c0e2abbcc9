"""The drafter multiplies with the target's lm_head as SGLang does, quantized or not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from sglang.srt.models.gemma3_causal import Gemma3TextScaledWordEmbedding
from torch import nn

from sglang_dflash.drafting.drafter import Drafter
from sglang_dflash.drafting.graphs import GraphedDrafter
from sglang_dflash.drafting.noise import BlockNoise
from sglang_dflash.drafting.options import Options
from sglang_dflash.drafting.parallel import TensorParallel
from sglang_dflash.drafting.recording_check import check_recording
from sglang_dflash.drafting.weights import load_model
from sglang_dflash.serving.start.target_head import target_head, unserved_target
from tests.conftest import random_model, raw_config, with_own
from tests.drafting.test_recording import drafter_of, table
from tests.drafting.test_weights import Ranks, save_model
from tests.quantized_head import METHODS, Head, Model, quantized
from tests.recording import OpRecorder

VOCAB, HIDDEN, ALONE = 64, 32, TensorParallel()
DFLASH2 = with_own(selector_rank=8, selector_top_k=5, conv_kernel_size=2, conv_group_size=4)


def model_with(name: str, weight: torch.Tensor, first_id: int = 0) -> Model:
    model = Model(quantized(Head(weight, first_id), METHODS[name]()))
    assert unserved_target(model) is None
    return model


def dequantized(model: Model) -> torch.Tensor:
    head: Any = model.lm_head
    return head.quant_method.dense(head)[: head.shard_indices.num_org_elements]


@pytest.mark.parametrize("raw", [{}, DFLASH2], ids=["argmax", "dflash2"])
@pytest.mark.parametrize("name", METHODS)
def test_drafts_are_those_of_the_dequantized_head(
    name: str, raw: dict[str, Any], tmp_path: Path
) -> None:
    """Greedy and sampled, on one rank and on two, and never a row of padding."""
    raw = raw_config(**raw)
    save_model(random_model(raw), raw, tmp_path, torch.float32)
    weight, hidden = torch.randn(VOCAB, HIDDEN), torch.randn(5, 4, HIDDEN)
    bonus = torch.randint(0, VOCAB - 1, (5,))
    noise = BlockNoise(torch.arange(5), torch.tensor([0.0, 0.5, 1, 1, 2]), torch.arange(3, 8))

    def drafted(tp: TensorParallel, method: str | None) -> Any:
        rows = weight.chunk(tp.size)[tp.rank]
        model = model_with(name, rows, tp.rank * len(rows))
        if method is None:
            model = Model(Head(dequantized(model), tp.rank * len(rows)))
        borrowed = target_head(model, tp)
        head = load_model(tmp_path, dtype=torch.float32, tp=tp).make_head(borrowed)
        short = head.shortfall(hidden, bonus, head(hidden, bonus, None))
        return head(hidden, bonus, None), head(hidden, bonus, noise), short

    expected = drafted(TensorParallel(), None)
    assert not torch.equal(*expected[1].tokens)
    alone, ranks = drafted(TensorParallel(), name), Ranks(2).run(lambda tp: drafted(tp, name))
    for likeliest, by_rule, short in (alone, *ranks):
        assert torch.equal(likeliest, expected[0])
        torch.testing.assert_close(by_rule, expected[1], atol=1e-4, rtol=1e-5)
        assert likeliest.max() < VOCAB and short.abs().max() <= 1e-6


def test_drafts_of_a_quantized_head_are_recorded() -> None:
    known = drafter_of(None)
    head = target_head(model_with("Packed4Bits", torch.randn(VOCAB, HIDDEN)), ALONE)
    drafter = Drafter(known.model, head, known.groups, Options().resolve(known.model.config))
    slots = table()
    recorded = GraphedDrafter(drafter, OpRecorder(), slots, (1, 3), ())
    check_recording(drafter, recorded, slots, (1, 3))
    assert recorded.replays["propose"]


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("name", METHODS)
def test_new_weights_of_a_quantized_head_are_followed(name: str, in_place: bool) -> None:
    """SGLang loads them into the same memory, or its method makes tensors anew of what it loads."""
    model, hidden = model_with(name, torch.randn(VOCAB, HIDDEN)), torch.randn(4, HIDDEN)
    head, logits = target_head(model, ALONE), None
    for weight in torch.randn(2, VOCAB, HIDDEN):
        other = model_with(name, weight).lm_head
        for attribute in ("weight", "qweight", "weight_scale"):
            if hasattr(other, attribute) and in_place:
                getattr(model.lm_head, attribute).data.copy_(getattr(other, attribute).data)
            elif hasattr(other, attribute):
                setattr(model.lm_head, attribute, getattr(other, attribute))
        before, logits = logits, head.logits(hidden)
        torch.testing.assert_close(logits, hidden @ dequantized(model).T)
        assert torch.equal(logits, target_head(Model(other), ALONE).logits(hidden))
        assert before is None or not torch.equal(before, logits)


class ModelOptFp4LinearMethod:
    """A method's name that SGLang believes only if the weight has its layout."""

    quant_mode = "nvfp4"

    def apply(self, *_: Any) -> Any:
        raise AssertionError("the head is dense")


def test_a_stale_method_is_not_applied_to_a_dense_weight() -> None:
    head: Any = Head(torch.randn(VOCAB, HIDDEN).bfloat16())
    head.quant_method = ModelOptFp4LinearMethod()
    assert unserved_target(Model(head)) is None
    # In float32, as of a target whose lm_head alone has 32 bits, too.
    hidden = torch.randn(3, HIDDEN)
    expected = hidden.bfloat16() @ head.weight[:VOCAB].T
    assert torch.equal(target_head(Model(head), ALONE).logits(hidden), expected)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_an_embedding_that_every_rank_has_whole_is_borrowed(ranks: int) -> None:
    """Gemma 4's embedding scales what it embeds; as the lm_head, its weight is used unscaled."""
    tied = Gemma3TextScaledWordEmbedding(VOCAB, HIDDEN, 0, embed_scale=HIDDEN**0.5)
    model, hidden = Model(tied), torch.randn(5, HIDDEN)
    model.get_input_embeddings = lambda: tied
    assert unserved_target(model) is None
    heads = [target_head(model, TensorParallel(rank, ranks)) for rank in range(ranks)]
    parts = [head.logits(hidden) for head in heads]
    torch.testing.assert_close(torch.cat(parts, 1), hidden @ tied.weight.T)
    ends = torch.tensor([part.shape[1] for part in parts]).cumsum(0).tolist()
    assert [head.first_id for head in heads] == [0, *ends[:-1]] and ends[-1] == VOCAB
    ids = torch.arange(VOCAB)
    assert torch.equal(heads[-1].embed(ids), tied.weight * HIDDEN**0.5)


def test_a_head_that_nothing_multiplies_is_left_to_sglangs_worker() -> None:
    head: Any = Head(torch.randn(VOCAB, HIDDEN))
    assert unserved_target(Model(head)) is None
    head.weight = nn.Parameter(head.weight.to(torch.float8_e4m3fn), requires_grad=False)
    head.quant_method = ModelOptFp4LinearMethod()
    found = unserved_target(Model(head)) or ""
    assert "float8_e4m3fn" in found and "ModelOptFp4LinearMethod" in found
    del head.weight, head.quant_method
    assert "no weight" in (unserved_target(Model(head)) or "")
    assert "missing" in (unserved_target(nn.Module()) or "")
    assert "Linear" in (unserved_target(Model(nn.Linear(2, 2))) or "")
