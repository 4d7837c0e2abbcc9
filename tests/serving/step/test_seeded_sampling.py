"""A seeded request's token depends on its own logits, parameters, seed and position."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from scipy.stats import chisquare
from sglang.srt.layers import sampler as sglangs
from sglang.srt.sampling.sampling_params import TOP_K_ALL
from torch import Tensor

from sglang_dflash.plugins.platform_cpu.torch_ops import murmur_hash32
from sglang_dflash.serving.step import seeded_sampling
from sglang_dflash.serving.step.seeded_sampling import kept_weights, sample_by_token_id
from tests.patches.originals import original
from tests.serving.batches import sampling_info
from tests.target_law import target_probabilities

VOCABULARY = 64
WAYS: list[dict[str, float]] = [
    {},
    {"top_k": 1},
    {"top_k": 6},
    {"top_p": 0.8},
    {"min_p": 0.1},
    {"top_k": 20, "top_p": 0.9, "min_p": 0.02},
]
TARGET = "sglang.srt.layers.sampler.Sampler._sample_from_probs"


@pytest.fixture(autouse=True)
def _on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sglangs, "murmur_hash32", murmur_hash32)
    sampled_by(monkeypatch, "pytorch")
    with torch.compiler.set_stance("force_eager"):
        yield


def sampled_by(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    """Set --sampling-backend."""
    chosen = SimpleNamespace(kernel=SimpleNamespace(sampling_backend=backend))
    for module in (sglangs, seeded_sampling):
        monkeypatch.setattr(module, "get_exec", lambda: chosen)


def info(ways: list[dict[str, float]], seeds: Tensor | None, mask: Tensor | None = None) -> Any:
    def column(name: str, default: float, dtype: torch.dtype) -> Tensor:
        return torch.tensor([way.get(name, default) for way in ways], dtype=dtype)

    return sampling_info(
        top_ks=column("top_k", TOP_K_ALL, torch.int32),
        top_ps=column("top_p", 1.0, torch.float32),
        min_ps=column("min_p", 0.0, torch.float32),
        need_top_k_sampling=any("top_k" in way for way in ways),
        need_top_p_sampling=any("top_p" in way for way in ways),
        need_min_p_sampling=any("min_p" in way for way in ways),
        sampling_seed=seeds,
        sampling_mask_batch_indices=mask,
    )


def probabilities(rows: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return (2 * torch.randn(rows, VOCABULARY, generator=generator)).softmax(-1)


def draw(probs: Tensor, ways: list[dict[str, float]], seeds: Tensor, positions: Tensor) -> Tensor:
    simple = not any(ways)
    found, captured = sample_by_token_id(
        None, None, probs.clone(), info(ways, seeds), positions, simple
    )
    assert captured is None and found.dtype == torch.int32
    return found


@pytest.mark.parametrize("backend", ["pytorch", "flashinfer"])
def test_a_request_finds_its_sampler_compiled(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It finds the kernels of top-k and top-p loaded, too, on another device than a CPU."""
    graphs, loaded, device = [], list[str](), torch.device("meta")

    def compiled(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    # Our CPU platform sets it, so here SGLang's function is not compiled.
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    theirs = sglangs.multinomial_with_seed
    ours = torch.compile(theirs, dynamic=True, backend=compiled)
    monkeypatch.setattr(seeded_sampling, "multinomial_with_seed", ours)
    for name in ("top_k_renorm_prob", "top_p_renorm_prob"):
        noted = lambda probs, _, name=name: loaded.append(name) or probs.clone()  # noqa: E731
        monkeypatch.setattr(sglangs, name, noted, raising=False)
    sampled_by(monkeypatch, backend)
    torch.compiler.reset()
    with torch.compiler.set_stance("default"), device:
        seeded_sampling.warm_up(device, VOCABULARY)
        started, kernels = len(graphs), set(loaded)
        for rows in (1, 2, 7, 64, 65, 200):
            probs, numbers = torch.rand(rows, VOCABULARY), torch.arange(rows)
            asked = sampling_info(
                sampling_seed=numbers * 3, top_ks=numbers, top_ps=probs[:, 0], min_ps=probs[:, 0]
            )
            for simple in (True, False):
                sample_by_token_id(None, None, probs, asked, numbers, simple)
    assert started == len(graphs) == 2 and set(loaded) == kernels
    assert len(kernels) == 2 * (backend == "flashinfer")


def test_a_row_has_the_same_token_alone_and_beside_any_others() -> None:
    rows = 10 * len(WAYS)
    ways, probs = WAYS * 10, probabilities(rows)
    seeds, positions = torch.arange(rows) // len(WAYS), torch.arange(rows) * 3
    together = draw(probs, ways, seeds, positions)
    for row in range(rows):
        one = slice(row, row + 1)
        assert draw(probs[one], ways[one], seeds[one], positions[one]) == together[row]
    assert together[1] == probs[1].argmax()


def test_an_unfiltered_batch_has_sglangs_tokens() -> None:
    probs, seeds = probabilities(50), torch.arange(50)
    theirs = sglangs.sampling_from_probs_torch(probs.clone(), seeds, seeds)
    assert torch.equal(draw(probs, [{}] * 50, seeds, seeds), theirs)


def test_tokens_depend_on_neighbors_without_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    own, rows = original(TARGET), 50
    probs, seeds = probabilities(rows + 1), torch.arange(rows + 1)

    def theirs(ways: list[dict[str, float]], simple: bool) -> Tensor:
        some = probs[: len(ways)].clone()
        asked = info(ways, seeds[: len(ways)])
        return own(None, some, asked, seeds[: len(ways)], simple)[0][:rows]

    alone, beside_greedy = theirs([{}] * rows, True), theirs([{}] * rows + [{"top_k": 1}], False)
    assert (alone != beside_greedy).sum() > rows // 4
    with pytest.raises(AssertionError):
        theirs([{"min_p": 0.1}], False)
    # As on a GPU.
    sampled_by(monkeypatch, "flashinfer")
    for way in ({"top_k": 6}, {"top_p": 0.8}, {"min_p": 0.1}):
        with pytest.raises(AssertionError, match="seed is not supported for flashinfer"):
            theirs([way], False)


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_tokens_follow_the_law(way: dict[str, float]) -> None:
    draws = 20_000
    probs = probabilities(1)
    law = target_probabilities(
        probs.log(),
        top_k=int(way.get("top_k", 0)),
        top_p=way.get("top_p", 1.0),
        min_p=way.get("min_p", 0.0),
    )[0]
    seeds, positions = torch.arange(draws) % 100, torch.arange(draws) // 100
    found = draw(probs.expand(draws, -1), [way] * draws, seeds, positions)
    counts = found.long().bincount(minlength=VOCABULARY)
    assert counts[law == 0].sum() == 0
    often = law * draws >= 5
    observed = [*counts[often].tolist(), int(counts[~often].sum())]
    expected = [*(law[often].double() * draws).tolist(), 0.0]
    expected[-1] = draws - sum(expected)
    if observed[-1] == 0:
        observed, expected = observed[:-1], [e * draws / sum(expected[:-1]) for e in expected[:-1]]
    if len(observed) > 1:
        assert chisquare(observed, expected).pvalue > 1e-6


def test_without_top_p_no_token_is_left_out() -> None:
    """The sum of the probabilities may round to more than 1."""
    probs = torch.full((2, 100_000), 1.001e-5)
    kept = kept_weights(probs, info([{}, {"top_k": 1}], None))
    assert (kept > 0).sum(-1).tolist() == [100_000, 1]


def test_masks_show_what_a_token_was_drawn_from() -> None:
    ways, probs = [{"top_k": 6}, {"top_p": 0.8}, {}], probabilities(3)
    rows = torch.tensor([0, 1])
    asked = info(ways, torch.tensor([1, 2, 3]), rows)
    tokens, captured = sample_by_token_id(None, None, probs, asked, torch.tensor([4, 5, 6]), False)
    assert captured is not None
    assert torch.equal(captured.weights, kept_weights(probs, asked)[rows])
    assert (captured.weights[0] > 0).sum() == 6
    assert captured.selected_weight.tolist() == [probs[i, tokens[i]].item() for i in (0, 1)]


def test_rows_without_seeds_are_left_to_sglang() -> None:
    asked = info([{"top_k": 6}], None)
    args = object(), probabilities(1), asked, torch.tensor([0]), False
    assert sample_by_token_id(lambda *given: given, *args) == args


def renormalized(keep: Tensor, probs: Tensor) -> Tensor:
    kept = probs * keep
    return kept / kept.sum(-1, keepdim=True)


def top_k_renorm(probs: Tensor, top_ks: Tensor) -> Tensor:
    """Renormalize as the kernel does: ties of the last one are kept."""
    at = top_ks.clamp(max=probs.shape[-1]).long()[:, None] - 1
    return renormalized(probs >= probs.sort(-1, descending=True).values.gather(1, at), probs)


def top_p_renorm(probs: Tensor, top_ps: Tensor) -> Tensor:
    ordered = probs.sort(-1, descending=True).values
    inside = (ordered.cumsum(-1) - ordered) <= top_ps[:, None]
    least = ordered.masked_fill(~inside, 2).amin(-1, keepdim=True)
    return renormalized(probs >= least, probs)


def test_kernels_that_renormalize_keep_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU no vocabulary is sorted. Of equal probabilities a greedy request takes the first."""
    ways, probs = WAYS * 5, probabilities(5 * len(WAYS))
    probs[1, 7] = probs[1, 9] = probs[1].max() * 2
    expected = kept_weights(probs, info(ways, None))
    monkeypatch.setattr(sglangs, "top_k_renorm_prob", top_k_renorm, raising=False)
    monkeypatch.setattr(sglangs, "top_p_renorm_prob", top_p_renorm, raising=False)
    sampled_by(monkeypatch, "flashinfer")
    assert torch.equal(kept_weights(probs, info(ways, None)), expected)
    assert expected[1].nonzero()[:, 0].tolist() == [7]
