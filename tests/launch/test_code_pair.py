"""The stages of the `code` pair's training, with a tiny untrained target."""

from __future__ import annotations

import copy
import random
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import Qwen3Config, Qwen3ForCausalLM

from sglang_dflash.drafting.model import DraftModel
from sglang_dflash.facts.draft_config import DraftConfig
from sglang_dflash.transformers_loop.generation import spec_generate

sys.path.insert(0, str(Path(__file__).parents[2] / "launch"))
from demo_training import (
    code_card,
    code_draft,
    code_pair,
    continuations,
    data,
    drafter,
    figures,
    target,
    unloop,
)
from demo_training.decoder import Decoder
from demo_training.split import Split

TRAIN = {f"t{i}.py": f"def train_{i}(a, b):\n    return a * {i} + b\n\n" * 40 for i in range(4)}
HELD_OUT = {"h.py": "class Held:\n    secret = 'held out'\n" * 60}
SPLIT = Split(TRAIN, HELD_OUT, ())


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return data.train_bpe(list(TRAIN.values()), 300)


@pytest.fixture(scope="module")
def tiny(tokenizer: Tokenizer) -> Qwen3ForCausalLM:
    """Random weights, large enough that its text depends on the prompt."""
    torch.manual_seed(0)
    config = Qwen3Config(  # type: ignore[call-arg]
        vocab_size=300,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        tie_word_embeddings=True,
        initializer_range=0.2,
        rope_theta=1000000.0,
        eos_token_id=tokenizer.token_to_id(data.IM_END),
        pad_token_id=tokenizer.token_to_id(data.END_OF_TEXT),
        bos_token_id=None,
    )
    return Qwen3ForCausalLM(config).eval().requires_grad_(False)


def make_draft(tiny: Qwen3ForCausalLM, tokenizer: Tokenizer) -> DraftModel:
    raw = drafter.draft_config(tiny, tokenizer) | {"head_dim": 16, "intermediate_size": 96}
    torch.manual_seed(1)
    return DraftModel(DraftConfig.from_dict(raw))


def shards_of(
    tiny: Qwen3ForCausalLM, tokenizer: Tokenizer, folder: Path, count: int
) -> list[continuations.Shard]:
    stream = data.token_stream(tokenizer, TRAIN)
    continuations.write_shards(Decoder(tiny, (1, 4, 6)), stream, [], folder, count)
    return [continuations.read_shard(file) for file in sorted(folder.glob("*.pt"))]


def test_the_decoder_computes_what_transformers_does(tiny: Qwen3ForCausalLM) -> None:
    ids = torch.randint(0, 300, (3, 20))
    decoder = Decoder(tiny, (1, 4))
    first, _ = decoder.start(ids[:, :12], 20)
    parts = [first]
    for at in range(12, 20):
        seen, logits = decoder.extend(ids[:, at : at + 1])
        parts.append(seen)
    with torch.no_grad():
        out = tiny(input_ids=ids, output_hidden_states=True)
    expected = torch.cat([out.hidden_states[i] for i in (2, 5, 8)], -1)
    torch.testing.assert_close(torch.cat(parts, 1), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(logits, out.logits[:, -1], rtol=1e-4, atol=1e-4)


def test_the_decoder_can_forget_texts(tiny: Qwen3ForCausalLM) -> None:
    ids = torch.randint(0, 300, (3, 9))
    decoder = Decoder(tiny, ())
    decoder.start(ids[:, :8], 9)
    decoder.keep(torch.tensor([2, 0]))
    _, logits = decoder.extend(ids[[2, 0], 8:])
    with torch.no_grad():
        expected = tiny(input_ids=ids[[2, 0]]).logits[:, -1]
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_a_cut_run_of_continuations_writes_the_same_texts(
    tiny: Qwen3ForCausalLM,
    tokenizer: Tokenizer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(continuations, "BATCH", 3)
    monkeypatch.setattr(continuations, "WINDOW", 184)
    whole = shards_of(tiny, tokenizer, tmp_path / "whole", 3)
    shards_of(tiny, tokenizer, tmp_path / "cut", 2)
    # A cut while the second was written: it is not there, its beginning is.
    (tmp_path / "cut" / "0001.pt").rename(tmp_path / "cut" / "0001.tmp")
    resumed = shards_of(tiny, tokenizer, tmp_path / "cut", 3)
    assert len(whole) == len(resumed) == 3
    for one, other in zip(whole, resumed, strict=True):
        assert torch.equal(one.ids, other.ids) and torch.equal(one.hidden, other.hidden)
        assert torch.equal(one.ends, other.ends) and one.begin == other.begin


def test_prompts_of_continuations_are_training_text(tokenizer: Tokenizer) -> None:
    stream = data.token_stream(tokenizer, TRAIN)
    text = tokenizer.decode(stream.tolist(), skip_special_tokens=False)
    for seed in range(20):
        prompts = continuations.cut_prompts(stream, random.Random(seed), 8)
        assert 48 <= prompts.shape[1] < 160
        for prompt in prompts:
            assert tokenizer.decode(prompt.tolist(), skip_special_tokens=False) in text
            assert "Held" not in tokenizer.decode(prompt.tolist())


def test_the_stage_reads_training_files_only(
    tiny: Qwen3ForCausalLM,
    tokenizer: Tokenizer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target.save_target(copy.deepcopy(tiny), tokenizer, tmp_path / "out" / "target")
    streams: list[torch.Tensor] = []
    monkeypatch.setattr(
        code_pair, "write_shards", lambda decoder, stream, *rest: streams.append(stream)
    )
    code_pair.make_continuations(SPLIT, tokenizer, tmp_path, tmp_path / "out", 1)
    assert torch.equal(streams[0], data.token_stream(tokenizer, TRAIN))
    (tmp_path / "continuations" / "target.sha256").write_text("another")
    with pytest.raises(ValueError, match="another target"):
        code_pair.make_continuations(SPLIT, tokenizer, tmp_path, tmp_path / "out", 1)


def test_texts_are_the_targets_own_and_stop_in_loops(
    tiny: Qwen3ForCausalLM, tokenizer: Tokenizer
) -> None:
    prompts = continuations.cut_prompts(data.token_stream(tokenizer, TRAIN), random.Random(0), 8)
    shard = continuations.make_shard(Decoder(tiny, (1, 4, 6)), prompts, [], sampled=0, seed=0)
    with torch.no_grad():
        out = tiny(input_ids=shard.ids, output_hidden_states=True)
    greedy = out.logits.argmax(-1)
    loops = 0
    for row, end in enumerate(shard.ends.tolist()):
        own = slice(shard.begin - 1, end - 1)
        assert torch.equal(shard.argmax[row, own], greedy[row, own])
        assert torch.equal(shard.ids[row, shard.begin : end], greedy[row, own])
        seen = torch.cat([out.hidden_states[i + 1][row, : end - 1] for i in (1, 4, 6, 7)], -1)
        torch.testing.assert_close(shard.hidden[row, : end - 1].float(), seen, rtol=1e-2, atol=1e-2)
        text = shard.ids[row, shard.begin : end].tolist()
        if end < continuations.WINDOW:
            assert len(text) - figures.loop_start(text) <= continuations.LOOP_TOKENS
            loops += 1
    assert 0 < loops <= shard.looped


def batch_of(anchor: int, end: int, wrong_at: int | None = None) -> code_draft.Batch:
    """One window of 20 tokens that count up, and the target's tokens: the same but one."""
    ids = torch.arange(20)[None]
    argmax = ids + 1
    if wrong_at is not None:
        argmax[0, wrong_at - 1] = 77
    hidden = torch.zeros(1, 20, 4)
    return code_draft.Batch(ids, argmax, hidden, torch.tensor([end]), torch.tensor([[anchor]]))


def test_labels_end_with_the_text_and_after_a_sampled_token() -> None:
    labels, known = code_draft.labels_of(batch_of(3, 20))
    assert labels.tolist() == [[list(range(4, 11))]] and known.all()
    _, known = code_draft.labels_of(batch_of(3, 7))
    assert known.tolist() == [[[True] * 3 + [False] * 4]]
    # Token 6 of the text was sampled, the target's own was 77: that is learned, nothing after.
    labels, known = code_draft.labels_of(batch_of(3, 20, wrong_at=6))
    assert known.tolist() == [[[True] * 3 + [False] * 4]] and labels[0, 0, 2] == 77


def test_the_loss_weighs_positions(
    tiny: Qwen3ForCausalLM, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Uniform logits but for one position: its share of the loss is its weight."""
    draft = make_draft(tiny, tokenizer)
    batch = batch_of(3, 20)
    embed = torch.zeros(300, 64)
    weights = torch.exp(-torch.arange(7) / 4.0)
    for k in (0, 3, 6):
        logits = torch.zeros(1, 1, 7, 300)
        logits[0, 0, k, 4 + k] = 30.0
        monkeypatch.setattr(code_draft, "block_logits", lambda *_, logits=logits: logits)
        loss, accepted = code_draft.block_loss(draft, embed, batch, soft=0.0)
        expected = torch.log(torch.tensor(300.0)) * (1 - weights[k] / weights.sum())
        torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-4)
        assert accepted == (2 if k == 0 else 1)


def test_the_soft_loss_is_least_at_the_targets_distribution(
    tiny: Qwen3ForCausalLM, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft, embed = make_draft(tiny, tokenizer), torch.randn(300, 64) * 0.3
    width = draft.config.target_hidden_width
    hidden = torch.randn(1, 20, width + 64)
    batch = code_draft.Batch(
        torch.arange(20)[None],
        torch.arange(1, 21)[None],
        hidden,
        torch.tensor([20]),
        torch.tensor([[3]]),
    )
    right = (hidden[0, 3:10, width:] @ embed.T)[None, None]
    losses = []
    for logits in (right, right * 1.5, right.roll(1, 2)):
        monkeypatch.setattr(code_draft, "block_logits", lambda *_, logits=logits: logits)
        losses.append(float(code_draft.block_loss(draft, embed, batch, soft=1.0)[0]))
    assert losses[0] < losses[1] < losses[2]


def test_committed_is_what_the_real_loop_commits(
    tiny: Qwen3ForCausalLM, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(continuations, "WINDOW", 200)
    draft = make_draft(tiny, tokenizer)
    prompts = continuations.cut_prompts(data.token_stream(tokenizer, TRAIN), random.Random(0), 2)
    shard = continuations.make_shard(Decoder(tiny, (1, 4, 6)), prompts, [], sampled=0, seed=0)
    embed = tiny.get_input_embeddings().weight
    # Trained a little on these texts, so that drafts are accepted.
    optimizer = torch.optim.AdamW(draft.parameters(), lr=3e-3)
    for step in range(30):
        batch = code_draft.draw([shard], 2, 12, random.Random(step))
        loss, _ = code_draft.block_loss(draft, embed, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    draft.freeze()
    for row, end in enumerate(shard.ends.tolist()):
        new = end - shard.begin
        out = spec_generate(draft, tiny, shard.ids[row : row + 1, : shard.begin], new)
        counted = code_draft.committed(draft, embed, shard, row)
        assert sum(counted) == new - 1
        assert counted[:-1] == out.committed[: len(counted) - 1]
    assert max(counted) > 1


@pytest.mark.parametrize("allowed", [0, 12])
def test_repeats_and_not_the_first_period_are_unwanted(
    tiny: Qwen3ForCausalLM, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, allowed: int
) -> None:
    monkeypatch.setattr(unloop, "PROMPTS", 12)
    stream = data.token_stream(tokenizer, TRAIN)
    ids, unwanted, share = unloop.collect_loops(tiny, stream, random.Random(0), allowed)
    assert 0 < share < 1
    for row, marks in zip(ids.tolist(), unwanted.tolist(), strict=True):
        begin = len(row) - unloop.NEW_TOKENS
        start = begin + figures.loop_start(row[begin:])
        first = marks.index(True)
        assert all(marks[first:]) and not any(marks[:first])
        period = next(p for p in range(1, len(row)) if row[start + p :] == row[start:-p])
        assert first - start == max(period, min(3 * period, allowed))


def test_the_target_is_the_average_of_its_courses(
    tiny: Qwen3ForCausalLM, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every course begins with the trained model."""
    model = copy.deepcopy(tiny)
    before = {name: value.clone() for name, value in model.state_dict().items()}

    def course(course: unloop.Course, model: Qwen3ForCausalLM, *_: object) -> None:
        assert torch.equal(model.lm_head.weight, before["lm_head.weight"])
        model.load_state_dict({n: v + course.steps for n, v in model.state_dict().items()})

    monkeypatch.setattr(unloop, "run_course", course)
    unloop.train_unloop(model, torch.zeros(9), tokenizer, tmp_path)
    added = sum(course.share * course.steps for course in unloop.COURSES)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, before[name] + added)


def test_unlikelihood_lowers_the_marked_tokens(tiny: Qwen3ForCausalLM) -> None:
    ids = torch.randint(0, 300, (2, 12))
    marks = torch.zeros(2, 12, dtype=torch.bool)
    marks[0, 5] = True
    with torch.no_grad():
        p = tiny(input_ids=ids).logits[0, 4].softmax(-1)[ids[0, 5]]
    torch.testing.assert_close(unloop.unlikelihood(tiny, ids, marks), -torch.log1p(-p))


def test_figures_inside_and_outside_loops() -> None:
    tokens = [5, 6, 7, 8, 9, *[1, 2] * 5]
    one = figures.Answer([4, 4], tokens, figures.with_places([2, 3, 8, 4]), 5)
    assert figures.loop_start(tokens) == 5
    assert one.counts(None) == [2, 3, 8, 4]
    assert one.counts(loop=False) == [2, 3] and one.counts(loop=True) == [8, 4]
    assert figures.acceptance([one], loop=False) == 2.5
    assert figures.loop_share([one]) == 10 / 15
    assert figures.by_position([one], 4, loop=False) == [1.0, 0.5, 0.0]
    short = one.begun(7)
    assert short.tokens == tokens[:7] and short.counts(None) == [2, 3, 1]
    assert short.loop_start == 7


def test_lookup_runs_on_the_same_answer() -> None:
    """After 1 2 3 comes 4 5 6, as in the prompt."""
    one = figures.Answer([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6, 9], [], 7)
    assert one.lookup(8).steps == [(1, 6)]
    assert one.lookup(4).steps == [(1, 4), (5, 2)]
    assert figures.Answer([7, 8], [1, 2, 3], [], 3).lookup(8).steps == [(1, 1), (2, 1)]


def test_a_blinded_draft_sees_no_context(tiny: Qwen3ForCausalLM, tokenizer: Tokenizer) -> None:
    draft = make_draft(tiny, tokenizer).freeze()
    hidden = torch.randn(5, draft.config.target_hidden_width)
    blind = figures.blinded(draft)
    assert draft.context_kv(hidden, torch.arange(5)).abs().max() > 0
    assert not blind.context_kv(hidden, torch.arange(5)).any()
    assert draft.context_kv(hidden, torch.arange(5)).shape == (5, *draft.config.kv_shape)


def test_a_draft_without_windows_reads_the_whole_context(
    tiny: Qwen3ForCausalLM, tokenizer: Tokenizer
) -> None:
    raw = drafter.draft_config(tiny, tokenizer) | {"head_dim": 16, "intermediate_size": 96}
    raw |= {"layer_types": ["sliding_attention"] * 3, "sliding_window": 2, "is_causal": False}
    torch.manual_seed(1)
    draft = DraftModel(DraftConfig.from_dict(raw)).freeze()
    whole = figures.without_windows(draft)
    assert [layer.sliding_window for layer in draft.config.layers] == [2] * 3
    assert whole.config == make_draft(tiny, tokenizer).config
    for name, value in draft.state_dict().items():
        assert torch.equal(whole.state_dict()[name], value)


def test_prompts_are_whole_lines_of_the_files(tokenizer: Tokenizer) -> None:
    files = {**TRAIN, "short.py": "x = 1\n"}
    prompts = code_card.cut_prompts(files, tokenizer, count=8, tokens=60, seed=1)
    assert {item["file"] for item in prompts} == set(TRAIN)
    for item in prompts:
        lines = files[item["file"]].splitlines(keepends=True)[int(item["line"]) - 1 :]
        assert item["prompt"].endswith("\n")
        assert "".join(lines).startswith(item["prompt"] + item["continues"][:20])
        assert 40 <= len(tokenizer.encode(item["prompt"]).ids) <= 60
