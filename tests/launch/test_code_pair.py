"""The stages of the demo pair's training, with a tiny target."""

from __future__ import annotations

import copy
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import Qwen3Config, Qwen3ForCausalLM

from launch.demo_training import card, continuations, data, draft, figures, pair, unloop
from sglang_dflash.drafting.model import DraftModel
from sglang_dflash.drafting.weights import load_model
from sglang_dflash.facts.draft_config import DraftConfig
from sglang_dflash.transformers_loop import Generation

ROOT = Path(__file__).parents[2]
TRAIN = {f"t{i}.py": f"def train_{i}(a, b):\n    return a * {i} + b\n\n" * 40 for i in range(4)}
HELD_OUT = {"h.py": "class Held:\n    secret = 'held out'\n" * 60}
SPLIT = data.Split(TRAIN, HELD_OUT, ())


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return data.train_bpe(list(TRAIN.values()), 300)


def untrained(tokenizer: Tokenizer) -> Qwen3ForCausalLM:
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
    return Qwen3ForCausalLM(config)


@pytest.fixture(scope="module")
def tiny(tokenizer: Tokenizer) -> Qwen3ForCausalLM:
    return untrained(tokenizer).eval().requires_grad_(False)


def shard_of(tiny: Qwen3ForCausalLM, tokenizer: Tokenizer, texts: int) -> continuations.Shard:
    stream = data.token_stream(tokenizer, TRAIN)
    prompts = continuations.cut_prompts(stream, random.Random(0), texts)
    return continuations.make_shard(tiny, (1, 4, 6), prompts, [], sampled=0, seed=0)


def test_the_whole_recipe_makes_a_pair(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few steps of every stage; a stage whose result is there is skipped."""
    work, out = tmp_path / "work", tmp_path / "pair"
    work.mkdir()
    courses = [unloop.Course("unloop", 0.5, 2, 1e-4, 1, 2, 1, 0)]
    for module, name, value in (
        (data, "VOCAB_SIZE", 300),
        (pair, "build_target", untrained),
        (pair, "COURSES", courses),
        (pair, "WINDOW", 128),
        (pair, "BATCH", 2),
        (draft, "BATCH", 2),
        (unloop, "COURSES", courses),
        (unloop, "PROMPTS", 8),
        (unloop, "LOOPS", 2),
        (continuations, "BATCH", 4),
        (continuations, "WINDOW", 64),
        (continuations, "PROMPT_TOKENS", (16, 24)),
        (card, "PROMPTS", 2),
        (card, "NEW_TOKENS", 12),
    ):
        monkeypatch.setattr(module, name, value)
    assert pair.make_tokenizer(SPLIT, work).to_str() == tokenizer.to_str()
    for _ in range(2):
        pair.make_target(SPLIT, tokenizer, work, out, steps=2)
        pair.make_continuations(SPLIT, tokenizer, work, out, shards=1)
        pair.make_draft(tokenizer, work, out, steps=2)
        pair.make_dflash2(work, out, steps=2)
    card.write_card(out, SPLIT, tokenizer, pair.cpu_seconds(work))
    made = load_model(out / "draft", dtype=torch.float32)
    assert made.config.target_layer_ids == draft.TARGET_LAYERS
    text = (out / "README.md").read_text()
    assert "outside loops" in text and SPLIT.digest() in text and "`h.py`" in text
    stages = {"target", "unloop", "draft", "dflash2", "continuations"}
    assert set(pair.cpu_seconds(work)) == stages
    second = load_model(out / "dflash2", dtype=torch.float32).candidate_selector
    # Zeros at first: two steps have moved them.
    assert second is not None and second.successor_codebook.any()
    (work / "continuations" / "target.sha256").write_text("another")
    with pytest.raises(ValueError, match="another target"):
        pair.make_continuations(SPLIT, tokenizer, work, out, 1)


def test_a_draft_begins_with_the_targets_last_layers(
    tiny: Qwen3ForCausalLM, tokenizer: Tokenizer
) -> None:
    model = DraftModel(DraftConfig.from_dict(draft.draft_config(tiny, tokenizer)))
    draft.init_from_target(model, tiny)
    for own, of in zip(model.layers, tiny.model.layers[-3:], strict=True):
        assert torch.equal(own.o_proj.weight, of.self_attn.o_proj.weight)
        assert torch.equal(own.qkv_proj.weight[:64], of.self_attn.q_proj.weight)


def test_a_dflash2_draft_begins_as_the_v1_draft(
    tiny: Qwen3ForCausalLM, tokenizer: Tokenizer
) -> None:
    """The same hidden states, and a selector that changes no logits yet."""
    raw = draft.draft_config(tiny, tokenizer)
    first = DraftModel(DraftConfig.from_dict(raw))
    draft.init_from_target(first, tiny)
    second = DraftModel(DraftConfig.from_dict(draft.dflash2_config(raw)))
    draft.init_from_draft(second, first)
    selector = second.candidate_selector
    assert selector is not None
    torch.manual_seed(0)
    ids = torch.randint(0, 300, (1, 20))
    given = (torch.randn(1, 20, first.config.target_hidden_width), ids, torch.tensor([[4, 9]]))
    embed = tiny.get_input_embeddings().weight
    with torch.no_grad():
        hidden, logits = draft.block_logits(second, embed, *given)
        torch.testing.assert_close(logits, draft.block_logits(first, embed, *given)[1])
        added = draft.edge_logits(selector, hidden, logits.argmax(-1))
    assert not added.any() and selector.predecessor_codebook.any()


def test_a_cut_run_of_continuations_writes_the_same_texts(
    tiny: Qwen3ForCausalLM,
    tokenizer: Tokenizer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(continuations, "BATCH", 3)
    monkeypatch.setattr(continuations, "WINDOW", 64)
    monkeypatch.setattr(continuations, "PROMPT_TOKENS", (16, 24))
    stream = data.token_stream(tokenizer, TRAIN)

    def written(folder: Path, count: int) -> list[continuations.Shard]:
        continuations.write_shards(tiny, (1, 4, 6), stream, [], folder, count)
        return [continuations.read_shard(file) for file in sorted(folder.glob("*.pt"))]

    whole = written(tmp_path / "whole", 2)
    written(tmp_path / "cut", 2)
    # A cut while the second was written: it is not there, its beginning is.
    (tmp_path / "cut" / "0001.pt").rename(tmp_path / "cut" / "0001.tmp")
    resumed = written(tmp_path / "cut", 2)
    assert len(whole) == len(resumed) == 2
    for one, other in zip(whole, resumed, strict=True):
        assert torch.equal(one.ids, other.ids) and torch.equal(one.hidden, other.hidden)
        assert torch.equal(one.ends, other.ends) and one.begin == other.begin


def test_texts_are_the_targets_own_and_stop_in_loops(
    tiny: Qwen3ForCausalLM, tokenizer: Tokenizer
) -> None:
    shard = shard_of(tiny, tokenizer, 8)
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


def batch_of(anchor: int, end: int, wrong_at: int | None = None) -> draft.Batch:
    """One window of 20 tokens that count up, and the target's tokens: the same but one."""
    ids = torch.arange(20)[None]
    argmax = ids + 1
    if wrong_at is not None:
        argmax[0, wrong_at - 1] = 77
    hidden = torch.zeros(1, 20, 4)
    return draft.Batch(ids, argmax, hidden, torch.tensor([end]), torch.tensor([[anchor]]))


def test_labels_end_with_the_text_and_after_a_sampled_token() -> None:
    labels, known = draft.labels_of(batch_of(3, 20))
    assert labels.tolist() == [[list(range(4, 11))]] and known.all()
    _, known = draft.labels_of(batch_of(3, 7))
    assert known.tolist() == [[[True] * 3 + [False] * 4]]
    # Token 6 of the text was sampled, the target's own was 77: that is learned, nothing after.
    labels, known = draft.labels_of(batch_of(3, 20, wrong_at=6))
    assert known.tolist() == [[[True] * 3 + [False] * 4]] and labels[0, 0, 2] == 77


def test_a_draft_learns_the_targets_continuations(
    tiny: Qwen3ForCausalLM, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(continuations, "WINDOW", 200)
    shard, embed = shard_of(tiny, tokenizer, 2), tiny.get_input_embeddings().weight
    torch.manual_seed(1)
    model = DraftModel(DraftConfig.from_dict(draft.draft_config(tiny, tokenizer)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(30):
        batch = draft.draw([shard], 2, 12, random.Random(step))
        loss, _ = draft.block_loss(model, embed, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])


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
    unloop.train_unloop(model, data.WindowSampler(torch.zeros(9), tokenizer, 4, 0.0), tmp_path)
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


def test_several_drafts_are_measured_side_by_side() -> None:
    asked = ["code", "draft", "../code-dflash2/draft", "--prompts", "2", "--new-tokens", "24"]
    done = subprocess.run(
        [sys.executable, ROOT / "launch/measure_drafts.py", *asked],
        cwd=ROOT / "launch/demo_models", capture_output=True, text=True, check=True,
    )  # fmt: skip
    _, _, *rows = done.stdout.splitlines()
    first, second = ([cell.strip() for cell in row.split("|")[1:-1]] for row in rows)
    assert (first[0], second[0]) == ("draft", "../code-dflash2/draft") and first[1:] != second[1:]
    for _, outside, everywhere, share in (first, second):
        assert 1.2 < float(outside) <= float(everywhere) < 8 and 0 <= int(share[:-1]) <= 100


def test_figures_inside_and_outside_loops() -> None:
    looping = Generation([5, 6, 7, 8, 9, *[1, 2] * 5], [2, 3, 8, 4])
    assert figures.loop_start(looping.tokens) == 5
    assert figures.counts(looping, in_loops=True) == [2, 3, 8, 4]
    assert figures.counts(looping, in_loops=False) == [2, 3]
    assert figures.acceptance([looping], in_loops=False) == 2.5
    assert figures.loop_share([looping]) == 10 / 15


def test_a_text_ends_at_an_end_token_or_soon_after_a_loop_begins() -> None:
    text = [*range(10, 20), *[1, 2] * 40]
    assert continuations.text_end(text, []) == (10 + continuations.LOOP_TOKENS, True)
    assert continuations.text_end(text, [13]) == (4, False)
    assert continuations.text_end(text[:14], []) == (14, False)


def test_prompts_are_whole_lines_of_the_files(tokenizer: Tokenizer) -> None:
    files = {**TRAIN, "short.py": "x = 1\n"}
    prompts = card.cut_prompts(files, tokenizer, count=8, tokens=60, seed=1)
    assert {item["file"] for item in prompts} == set(TRAIN)
    for item in prompts:
        lines = files[item["file"]].splitlines(keepends=True)[int(item["line"]) - 1 :]
        assert item["prompt"].endswith("\n")
        assert "".join(lines).startswith(item["prompt"] + item["continues"][:20])
        assert 40 <= len(tokenizer.encode(item["prompt"]).ids) <= 60
