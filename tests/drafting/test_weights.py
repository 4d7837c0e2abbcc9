"""Checkpoints: round trip, sharding, and every kind of damage."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang_dflash.checkpoint.draft_config import DraftConfig
from sglang_dflash.checkpoint.tensors import check_weights, expected_tensors
from sglang_dflash.common.errors import ConfigError
from sglang_dflash.drafting.attention.reference import torch_block_attention
from sglang_dflash.drafting.heads.head import TargetHead
from sglang_dflash.drafting.model import DraftModel
from sglang_dflash.drafting.noise import BlockNoise, gumbel
from sglang_dflash.drafting.parallel import TensorParallel, argmax_of_shards
from sglang_dflash.drafting.weights import load_model, read_tensors, save_model
from tests.conftest import random_model, raw_config, rewrite, with_own
from tests.errors import refused


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    raw = raw_config()
    save_model(random_model(raw), raw, tmp_path, torch.float32)
    return tmp_path


def test_a_prefix_and_copies_of_the_targets_tensors_are_accepted(folder: Path) -> None:
    def change(tensors: dict) -> None:
        for name in list(tensors):
            tensors["model." + name] = tensors.pop(name)
        tensors["model.embed_tokens.weight"] = torch.zeros(64, 32)

    rewrite(folder, change)
    load_model(folder, dtype=torch.float32)


def test_codebooks_may_be_named_as_embeddings(tmp_path: Path) -> None:
    """A published export has them so (turboderp-org/exllamav3#390)."""
    raw = raw_config(**with_own(selector_rank=8, selector_top_k=5))
    save_model(random_model(raw), raw, tmp_path, torch.float32)
    expected = load_model(tmp_path, dtype=torch.float32).state_dict()

    def change(tensors: dict) -> None:
        for name in [name for name in tensors if name.endswith("_codebook")]:
            tensors[f"{name}.weight"] = tensors.pop(name)

    rewrite(tmp_path, change)
    check_weights(DraftConfig.from_dict(raw), tmp_path)
    got = load_model(tmp_path, dtype=torch.float32).state_dict()
    assert all(torch.equal(tensor, got[name]) for name, tensor in expected.items())


@pytest.mark.parametrize("changes", [{}, {"attention_bias": True}, {"draft_vocab_size": 24}])
def test_the_expected_tensors_are_those_of_the_network(changes: dict, tmp_path: Path) -> None:
    raw = raw_config(**changes)
    save_model(random_model(raw), raw, tmp_path, torch.float32)
    written = {name: tuple(tensor.shape) for name, tensor in read_tensors(tmp_path).items()}
    assert written.pop("d2t", None) == ((24,) if "draft_vocab_size" in changes else None)
    assert expected_tensors(DraftConfig.from_dict(raw)) == written


def test_a_trained_mask_embedding_is_refused_by_name(folder: Path) -> None:
    """Without it acceptance would be low. It is a pickle, and never read."""
    (folder / "mask_embedding.pt").write_bytes(b"no pickle")
    with pytest.raises(ConfigError, match=r"mask_embedding\.pt in it, a trained mask"):
        load_model(folder, dtype=torch.float32)


class Ranks:
    """Tensor parallelism in threads: `run` calls `function(tp)` on every rank."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=60)
        self.tensors = [torch.empty(0)] * size

    def all_gather(self, rank: int, x: torch.Tensor) -> torch.Tensor:
        self.tensors[rank] = x
        self.barrier.wait()
        gathered = torch.stack(self.tensors)
        self.barrier.wait()
        return gathered

    def run(self, function: Callable[[TensorParallel], Any]) -> list[Any]:
        def on_rank(rank: int) -> Any:
            tp = TensorParallel(
                rank,
                self.size,
                all_reduce=lambda x: self.all_gather(rank, x).sum(0),
                all_gather=lambda x: self.all_gather(rank, x),
            )
            return function(tp)

        with ThreadPoolExecutor(self.size) as pool:
            return list(pool.map(on_rank, range(self.size)))


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("bias", [False, True])
def test_shards_together_are_the_whole_model(tmp_path: Path, bias: bool, size: int) -> None:
    """Four query heads, two kv heads: on four ranks, two neighbors hold replicas of one kv head."""
    raw = raw_config(attention_bias=bias)
    save_model(random_model(raw), raw, tmp_path, torch.float32)
    x, target_hidden = torch.randn(1, 4, 32), torch.randn(1, 6, 64)
    positions = torch.arange(6)[None]

    def attend(_layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch_block_attention(q, k, v, torch.ones(1, 1, 4, dtype=torch.bool))

    def both(tp: TensorParallel) -> tuple[torch.Tensor, torch.Tensor]:
        model = load_model(tmp_path, dtype=torch.float32, tp=tp)
        kv = model.context_kv(target_hidden, positions)
        assert kv.shape[2:] == model.kv_shape
        return model(x, positions[:, :4], attend), kv

    hidden, kv = both(TensorParallel())
    for rank, (part_hidden, part_kv) in enumerate(Ranks(size).run(both)):
        torch.testing.assert_close(part_hidden, hidden, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(
            part_kv[..., 0, :], kv[..., rank * 2 // size, :], atol=1e-5, rtol=1e-5
        )


def test_an_lm_head_of_its_own_is_split_over_ranks(tmp_path: Path) -> None:
    """Drafts are the target's tokens, with the noise of these."""
    raw = raw_config(draft_vocab_size=40, final_logit_softcapping=3, output_multiplier=2)
    whole = random_model(raw)
    save_model(whole, raw, tmp_path, torch.float32)
    hidden, bonus = 3 * torch.randn(5, 4, 32), torch.zeros(5, dtype=torch.int64)
    noise = BlockNoise(torch.arange(5), torch.tensor([0.0, 0.5, 1, 1, 2]), torch.arange(3, 8))
    borrowed = TargetHead(lambda ids: ids, lambda hidden: hidden)

    def drafted(tp: TensorParallel) -> Any:
        head = load_model(tmp_path, dtype=torch.float32, tp=tp).make_head(borrowed)
        return head(hidden, bonus, None), head(hidden, bonus, noise)

    assert whole.lm_head is not None and whole.token_ids is not None
    logits = torch.full((5, 3, 64), -torch.inf)
    logits[..., whole.token_ids] = hidden[:, 1:] @ whole.lm_head.weight.detach().T
    capped = 3 * (2 * logits / 3).tanh()
    capped[logits.isinf()] = -torch.inf
    # One of the 16 likeliest tokens is drawn.
    capped, ids = capped.topk(16)
    coupled = ids.gather(-1, noise.scores(capped, ids).argmax(-1, keepdim=True))[..., 0]
    for likeliest, by_rule in (drafted(TensorParallel()), *Ranks(2).run(drafted)):
        assert torch.equal(likeliest, logits.argmax(-1))
        assert torch.equal(by_rule.tokens, torch.stack((likeliest, coupled)))
        heat = torch.tensor([1.0, 0.5, 1, 1, 2])[:, None, None]
        torch.testing.assert_close(by_rule.scores, capped / heat)
    assert not torch.equal(coupled[1:], noise.scores(logits, torch.arange(64)).argmax(-1)[1:])
    head = load_model(tmp_path, dtype=torch.float32).make_head(borrowed)
    missing = (torch.arange(64) != whole.token_ids[:, None]).all(0).nonzero()[0]
    assert (head.shortfall(hidden, bonus, likeliest) == 0).all()
    assert head.shortfall(hidden, bonus, missing.expand(5, 3)).isinf().all()


def test_the_walk_of_a_split_vocabulary(tmp_path: Path) -> None:
    """Each rank has the tables and gathers candidates: the tokens are those of a walk over the
    whole vocabulary."""
    own = with_own(selector_rank=8, selector_top_k=5, conv_kernel_size=2, conv_group_size=4)
    raw = raw_config(**own)
    save_model(random_model(raw), raw, tmp_path, torch.float32)
    hidden, bonus, embed = torch.randn(5, 4, 32), torch.randint(0, 63, (5,)), torch.randn(64, 32)
    noise = BlockNoise(torch.arange(5), torch.tensor([0.0, 0.5, 1, 1, 2]), torch.arange(3, 8))

    def drafted(tp: TensorParallel) -> Any:
        model = load_model(tmp_path, dtype=torch.float32, tp=tp)
        rows = embed.chunk(tp.size)[tp.rank]
        first = tp.rank * len(rows)
        head = model.make_head(TargetHead(lambda ids: ids, lambda h: h @ rows.T, first))
        short = head.shortfall(hidden, bonus, head(hidden, bonus, None))
        return head(hidden, bonus, None), head(hidden, bonus, noise), short

    model = load_model(tmp_path, dtype=torch.float32)
    selector: Any = model.head.candidate_selector

    def walked(r: int, temperature: float) -> list[int]:
        path = [int(bonus[r])]
        for place in range(3):
            state = hidden[r, place + 1]
            query = selector.predecessor_codebook[path[-1]] * selector.hidden_projection(state)
            logits = embed @ state
            scores = (logits + selector.successor_codebook @ query) / (temperature or 1.0)
            if temperature:
                scores += gumbel(noise.seeds[r], noise.seq_lens[r] + place, torch.arange(64))
            scores[logits.argsort()[:-5]] = -torch.inf
            path.append(int(scores.argmax()))
        return path[1:]

    expected = [walked(r, 0.0) for r in range(5)]
    coupled = [walked(r, float(noise.temperatures[r])) for r in range(5)]
    assert expected[0] == coupled[0] and expected != coupled
    assert expected != (hidden[:, 1:] @ embed.T).argmax(-1).tolist()
    for ranks in (1, 2, 4):
        for likeliest, by_rule, short in Ranks(ranks).run(drafted):
            assert likeliest.tolist() == expected
            assert by_rule.tokens.tolist() == [expected, coupled]
            assert short.abs().max() < 1e-5


BAD_MAPS: dict[str, tuple[Callable[[dict[str, torch.Tensor]], object], str]] = {
    "none": (lambda t: t.pop("d2t"), "tensor d2t of the draft: missing; draft_vocab_size needs it"),
    "short": (
        lambda t: t.update(d2t=t["d2t"][1:]),
        r"d2t of the draft: I64 of shape \[23\]; I64 of shape \[24\] is required",
    ),
    "floats": (lambda t: t.update(d2t=t["d2t"].float()), "d2t of the draft: F32 of"),
    "beyond the vocabulary": (lambda t: t["d2t"][-1:].fill_(41), "distinct tokens from 0 to 63"),
    "negative": (lambda t: t["d2t"][:1].fill_(-1), "distinct tokens from 0 to 63"),
    "twice": (lambda t: t["d2t"][1:2].copy_(t["d2t"][:1] - 1), "distinct tokens from 0 to 63"),
    "other tokens in t2d": (
        lambda t: t.update(t2d=torch.arange(64) < 24),
        "tensor t2d of the draft: the tokens of d2t are required",
    ),
    "short t2d": (lambda t: t.update(t2d=torch.arange(63) < 24), "t2d of the draft: BOOL of"),
    "no lm_head": (lambda t: t.pop("lm_head.weight"), "lm_head.weight of the draft: missing"),
}


@pytest.mark.parametrize("what", BAD_MAPS)
def test_a_draft_vocabulary_that_is_none_is_refused(what: str, tmp_path: Path) -> None:
    raw = raw_config(draft_vocab_size=24)
    model = random_model(raw)
    assert model.token_ids is not None
    # Neighbors that are not adjacent, so that each change has one effect.
    model.token_ids = 2 * torch.arange(24) + 2
    save_model(model, raw, tmp_path, torch.float32)
    marked = torch.zeros(64, dtype=torch.bool)
    marked[model.token_ids] = True
    rewrite(tmp_path, lambda tensors: tensors.update(t2d=marked))
    check_weights(model.config, tmp_path)
    change, message = BAD_MAPS[what]
    rewrite(tmp_path, change)
    with pytest.raises(ConfigError, match=message):
        check_weights(model.config, tmp_path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_argmax_of_a_split_vocabulary(dtype: torch.dtype) -> None:
    """Ids as large as in real vocabularies. bfloat16 has ties, and the first of them is taken."""
    logits = torch.randn(50, 248320, generator=torch.Generator().manual_seed(0)).to(dtype)
    cuts = [0, 82776, 165552, 248320]

    def best(tp: TensorParallel) -> torch.Tensor:
        first, end = cuts[tp.rank : tp.rank + 2]
        return argmax_of_shards(logits[:, first:end], first, tp)

    for ids in Ranks(3).run(best):
        torch.testing.assert_close(ids, logits.max(-1).indices)
    assert argmax_of_shards(logits, 0, TensorParallel()).tolist() == logits.argmax(-1).tolist()


def test_heads_that_do_not_divide_are_refused() -> None:
    with refused("tp_size", 3, reason="num_attention_heads"):
        DraftModel(DraftConfig.from_dict(raw_config()), TensorParallel(0, 3))


def test_dummy_weights_need_only_the_config(folder: Path) -> None:
    whole = load_model(folder, dtype=torch.bfloat16)
    (folder / "model.safetensors").unlink()
    dummy = load_model(folder, dtype=torch.bfloat16, dummy=True)
    assert {n: (t.shape, t.dtype) for n, t in dummy.state_dict().items()} == {
        n: (t.shape, t.dtype) for n, t in whole.state_dict().items()
    }
    hidden = dummy(
        torch.randn(1, 4, 32).bfloat16(), torch.arange(4)[None], lambda _layer, q, _k, _v: q
    )
    assert hidden.isfinite().all() and hidden.std() > 0
    half = load_model(folder, dtype=torch.bfloat16, tp=TensorParallel(1, 2), dummy=True)
    assert half.kv_shape == (3, 2, 1, 16)
