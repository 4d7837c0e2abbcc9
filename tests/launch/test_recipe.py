"""The parts of the recipe of a draft, with a small random target."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from launch.draft_training import card, draft, recipe, start, text
from launch.draft_training.loop import TrainingLimit, TrainingRun
from launch.draft_training.loops import loop_start
from launch.draft_training.recipe import Recipe
from launch.draft_training.states import States, read_text, states_of
from launch.draft_training.writers import TransformersWriter
from sglang_dflash.checkpoint.draft_config import DraftConfig
from sglang_dflash.drafting.model import DraftModel
from sglang_dflash.drafting.weights import load_model, save_model
from sglang_dflash.tools.bench.datasets import Prompt
from sglang_dflash.tools.transformers_loop.generation import spec_generate
from tests.launch.small_target import PROMPTS, write_target

HELD_OUT = {"chat": [Prompt(("Name a color.", "And one more?"), True), Prompt(("Hi there",), True)]}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    """Return a recipe with text of the prompts, and its states."""
    folder = tmp_path_factory.mktemp("recipe")
    prompts = [Prompt((prompt,), True) for prompt in PROMPTS]
    target = write_target(folder / "target")
    found = Recipe(target, folder / "work", prompts, HELD_OUT, dtype=torch.float32)
    found.write_text(shards=2, chats=6)
    found.write_states()
    return found


def test_texts_are_the_targets_own(made: Recipe) -> None:
    """Greedy ones are what Transformers writes; states are those of the whole text."""
    (states, *_) = made.shards()
    rows = read_text(made.work / "text/0000.jsonl")
    greedy = [row for row in rows if not row["sampled"]]
    assert len(rows) == 6 and len(greedy) > 0
    for row in greedy[:2]:
        begin, end = row["answers"][0]
        ids = torch.tensor([row["ids"]])
        wanted = made.target.generate(
            ids[:, :begin], attention_mask=torch.ones(1, begin), max_new_tokens=end - begin,
            do_sample=False, eos_token_id=2, pad_token_id=0,
        )  # fmt: skip
        assert wanted[0].tolist() == row["ids"]
    for i, row in enumerate(rows):
        own = slice(int(states.begins[i]), int(states.begins[i + 1]))
        with torch.no_grad():
            out = made.target(torch.tensor([row["ids"]]), output_hidden_states=True)
        joined = torch.cat([out.hidden_states[k + 1][0] for k in made.layers], -1)
        torch.testing.assert_close(states.hidden[own], joined.bfloat16())
        (begin, end) = row["answers"][0]
        best = out.logits[0, begin - 1 : end - 1].topk(8)
        assert torch.equal(states.likely[own][begin - 1 : end - 1].long(), best.indices)
        log_p = out.logits[0, begin - 1 : end - 1].log_softmax(-1).gather(1, best.indices)
        found = states.log_p[own][begin - 1 : end - 1].float()
        torch.testing.assert_close(found, log_p, atol=0.02, rtol=0.01)


def test_a_shard_does_not_depend_on_those_before_it(made: Recipe, tmp_path: Path) -> None:
    author = text.Author(TransformersWriter(made.target), made.tokenizer, made.ends)
    kept = (made.work / "text/0001.jsonl").read_text().splitlines()[1:]
    (tmp_path / "0000.jsonl").touch()
    text.write_shards(author, tmp_path, 2, 6, made.prompts)
    assert (tmp_path / "0001.jsonl").read_text().splitlines()[1:] == kept
    # Once every prompt has its greedy answer, the others are sampled.
    assert all(row["sampled"] for row in read_text(tmp_path / "0001.jsonl")[2:])


def test_the_target_writes_turns_itself(made: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chat begins with its kind's opening, and has two turns at most, all of them complete."""
    monkeypatch.setattr(text, "is_turn", lambda text: True)
    monkeypatch.setattr(text, "SECOND_TURN", 1.0)
    monkeypatch.setattr(text, "OPENINGS", {"code": (1.0, ("Write a",))})
    author = text.Author(TransformersWriter(made.target), made.tokenizer, made.ends)
    end = made.tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert author.ends_of_turn == {*made.ends, end}
    asked: list[tuple[str, int]] = []
    write = author._write

    def noted(jobs: Any, ends: Any, nucleus: Any) -> None:
        asked.extend((made.tokenizer.decode(job.prompt), len(jobs)) for job in jobs)
        for job in jobs:
            job.limit = 12
        write(jobs, ends, nucleus)
        for job in jobs:
            job.tokens, job.ended = [*job.tokens[:6], end], True

    monkeypatch.setattr(author, "_write", noted)
    chats = author.shard(0, 4, ())
    assert len(chats) == 4 and all(len(chat.messages) == 4 for chat in chats)
    assert all(chat.messages[0]["content"].startswith("Write a") for chat in chats)
    assert asked[0][0].endswith("<|im_start|>user\nWrite a")
    # The first answer, too, if its text gives the same tokens again.
    assert all(chat.answers[-1][1] == len(chat.ids) and chat.ids[-1] == end for chat in chats)


def test_near_copies_of_held_out_prompts_are_left_out(made: Recipe) -> None:
    words = [f"word{i}" for i in range(20)]
    author = text.Author(
        TransformersWriter(made.target),
        made.tokenizer,
        made.ends,
        [Prompt((" ".join(words),), True)],
    )
    near = f"Please: {' '.join(words[3 : 3 + text.NEAR_COPY])}!"
    far = f"Please: {' '.join(words[3 : 2 + text.NEAR_COPY])}!"
    assert not author.held_out.isdisjoint(text.grams(near))
    assert author.held_out.isdisjoint(text.grams(far))
    others = ("Hi", "Wie heißt 日本語 das?", "```python\nx = 1 + 2")
    assert text.is_turn(far) and not any(map(text.is_turn, others))


def test_prompts_of_a_file_that_are_held_out_are_not_answered(made: Recipe) -> None:
    """A later turn, too."""
    near = "Count the words of this sentence, of which there are more than thirteen, aloud."
    turns = [("def f():",), (near,), ("Why?", f"Well. {near}"), ("What is a list?",)]
    author = text.Author(
        TransformersWriter(made.target), made.tokenizer, made.ends, [Prompt((near,), True)]
    )
    chats = author.shard(0, 8, [Prompt(each, True) for each in turns])
    asked = [chat.messages[0]["content"] for chat in chats]
    assert asked == 2 * [turns[0][0], turns[3][0]]


def test_a_draft_begins_with_the_targets_last_layers(made: Recipe) -> None:
    model = made.new_draft()
    for own, of in zip(model.layers, made.target.model.layers[-3:], strict=True):
        assert torch.equal(own.o_proj.weight, of.self_attn.o_proj.weight)
        scaled = of.self_attn.q_proj.weight * of.input_layernorm.weight
        assert torch.equal(own.qkv_proj.weight[:256], scaled)
        assert torch.equal(own.q_norm.weight, of.self_attn.q_norm.weight)
    assert made.raw["dflash_config"]["mask_token_id"] not in made.ends


def test_a_dflash2_draft_begins_as_the_v1_draft(made: Recipe) -> None:
    """The same hidden states, and a selector that changes no logits yet."""
    first = made.new_draft()
    second = DraftModel(DraftConfig.from_dict(start.dflash2_config(made.raw)))
    start.init_from_draft(second, first)
    batch = draft.draw(made.shards(), 2, 3, random.Random(0))
    with torch.no_grad():
        hidden = draft.block_hidden(second, made.embed, batch)
        torch.testing.assert_close(hidden, draft.block_hidden(first, made.embed, batch))
        selector: Any = second.head.candidate_selector
        before = batch.ids[:, :24].view(2, 3, 8)
        added = draft.edge_logits(selector, hidden, before, torch.arange(9))
    assert not added.any() and selector.predecessor_codebook.any()


def batch_of(anchor: int, end: int, wrong_at: int | None = None) -> draft.Batch:
    """One text of 20 tokens that count up, and the target's tokens: the same but one."""
    ids = torch.arange(20)[None]
    likely = (ids + 1)[..., None]
    if wrong_at is not None:
        likely[0, wrong_at - 1] = 77
    none = torch.zeros(1, 20, 4)
    return draft.Batch(ids, none, likely, none, torch.tensor([end]), torch.tensor([[anchor]]))


def test_labels_end_with_the_text_and_after_a_sampled_token() -> None:
    labels, known = draft.labels_of(batch_of(3, 20), 8)
    assert labels.tolist() == [[list(range(4, 11))]] and known.all()
    _, known = draft.labels_of(batch_of(3, 7), 8)
    assert known.tolist() == [[[True] * 3 + [False] * 4]]
    # Token 6 of the text was sampled, the target's own was 77: that is learned, nothing after.
    labels, known = draft.labels_of(batch_of(3, 20, wrong_at=6), 8)
    assert known.tolist() == [[[True] * 3 + [False] * 4]] and labels[0, 0, 2] == 77


def test_the_softmax_stands_for_the_whole_vocabulary(
    made: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Needed tokens are in it as they are; the others' probability is right on average."""
    monkeypatch.setattr(draft, "FREQUENT", 20)
    monkeypatch.setattr(draft, "OTHERS", 100)
    of, needed = draft.Vocabulary(1024, made.shards()), torch.tensor([[1001, 5], [7, 1001]])
    logits = torch.randn(1024)
    sums = []
    for seed in range(60):
        tokens, added = of.tokens(needed, random.Random(seed))
        assert torch.isin(needed, tokens).all() and torch.equal(tokens, tokens.sort().values)
        assert not added[torch.isin(tokens, needed)].any()
        assert len(tokens) <= 20 + 3 + 100
        sums.append((logits[tokens] + added).exp().sum())
    torch.testing.assert_close(torch.stack(sums).mean(), logits.exp().sum(), rtol=0.05, atol=0)


def test_a_layer_reads_no_further_than_its_window(made: Recipe) -> None:
    raw = {**made.raw, "sliding_window": 9}
    model = DraftModel(DraftConfig.from_dict(raw))
    (states, *_) = made.shards()
    end = int(states.answers[0, 2])
    batch = draft.gather([(states, 0)], torch.tensor([[end - 10]]))
    with torch.no_grad():
        before = draft.block_hidden(model, made.embed, batch)
        # The first query sees 8 tokens of context.
        batch.hidden[:, : end - 10 - 8] = 0
        assert torch.equal(draft.block_hidden(model, made.embed, batch), before)
        batch.hidden[:, end - 10 - 8] = 0
        after = draft.block_hidden(model, made.embed, batch)
        assert not torch.equal(after[0, 0, 0], before[0, 0, 0])


def learned(made: Recipe, steps: int) -> tuple[DraftModel, list[float]]:
    model = made.new_draft()
    of = draft.Vocabulary(1024, made.shards())
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=3e-3), []
    for step in range(steps):
        rng = random.Random(step)
        batch = draft.draw(made.shards(), 3, 12, rng)
        loss, _ = draft.block_loss(model, made.embed, made.head, of, batch, rng)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, losses


@pytest.mark.parametrize("second", [False, True])
def test_a_walk_takes_the_steps_of_decoding(
    made: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, second: bool
) -> None:
    """A draft that has learned a little, on the held-out prompts and on those that it knows."""
    first, losses = learned(made, 40)
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
    raw, model = made.raw, first
    if second:
        raw = start.dflash2_config(made.raw)
        model = DraftModel(DraftConfig.from_dict(raw))
        start.init_from_draft(model, first)
        for name, weight in model.named_parameters():
            if "successor" in name or "kernel_projection" in name:
                weight.data.normal_(0, 0.1)
    recipe.save_model(model, raw, tmp_path, torch.float32)
    monkeypatch.setitem(made.held_out, "known", made.prompts)  # type: ignore[index]
    measured = made.measured(tmp_path)
    served = load_model(tmp_path, dtype=torch.float32)
    for name, states in made.held_out_states().items():
        steps = tokens = 0
        for length, prompt, answer in answers_of(states):
            done = spec_generate(served, made.target, prompt, length, stop_token_ids=(2,))
            assert done.tokens == answer[:length]
            steps, tokens = steps + len(done.committed), tokens + sum(done.committed)
        assert measured[name] == round(tokens / steps, 3)
    assert measured["known"] > 1.1


def answers_of(states: States) -> list[tuple[int, torch.Tensor, list[int]]]:
    """Tokens before a loop, the prompt, and the answer."""
    found = []
    for text_, begin, end in states.answers.tolist():
        ids = states.ids[int(states.begins[text_]) :][:end]
        answer = ids[begin:].tolist()
        found.append((loop_start(answer), ids[None, :begin], answer))
    return [of for of in found if of[0] > 1]


def test_the_state_of_another_target_is_refused(made: Recipe, tmp_path: Path) -> None:
    (tmp_path / "target.sha256").write_text("another")
    with pytest.raises(ValueError, match="another target"):
        Recipe(made.target_folder, tmp_path, (), {}, dtype=torch.float32)


def test_a_draft_goes_on_from_one_that_was_trained_before(made: Recipe, tmp_path: Path) -> None:
    """Its weights and its learning curve; another shape is refused."""
    model = made.new_draft()
    with torch.no_grad():
        model.fc.weight.normal_()
    save_model(model, made.raw, tmp_path / "first", torch.float32)
    row = {
        "step": 7,
        "device": "CPU",
        "seconds": 20,
        "blocks": 99,
        "in_batches": 1.2,
        "held_out": {"chat": 1.1},
    }
    (tmp_path / "first/curve.json").write_text(json.dumps([row]))
    again = Recipe(
        made.target_folder, made.work, made.prompts, made.held_out,
        dtype=torch.float32, start=tmp_path / "first",
    )  # fmt: skip
    assert torch.equal(again.new_draft().fc.weight, model.fc.weight)
    begun = again.new_draft().to(torch.bfloat16)
    of, batch = (
        draft.Vocabulary(1024, made.shards()),
        draft.draw(made.shards(), 2, 3, random.Random(0)),
    )
    embed, head = made.embed.bfloat16(), made.head.bfloat16()
    draft.block_loss(begun, embed, head, of, batch, random.Random(0))[0].backward()
    work = tmp_path / "work"
    (work / "text").mkdir(parents=True)
    again.work, again.measured = work, lambda folder: {"chat": 1.3}  # type: ignore[method-assign]
    run = TrainingRun(
        "draft",
        again.new_draft(),
        lambda rng: (torch.zeros(()), torch.ones(())),
        lr=1.0,
        work=again.work,
    )
    run.step, run.spent = 3, 5.0
    again.milestone(run, again.raw, 1.5, 1)
    card.write(again, "draft", tmp_path / "out")
    curve = json.loads((tmp_path / "out/curve.json").read_text())
    assert curve[0] == row and (curve[1]["step"], curve[1]["seconds"]) == (10, 25)
    assert "The first 7 steps were a run before" in (tmp_path / "out/README.md").read_text()
    again.raw = {**again.raw, "num_hidden_layers": 2}
    with pytest.raises(ValueError, match=r"its config\.json has another num_hidden_layers"):
        again.new_draft()


class Begun(Exception):
    """A run would begin."""


def test_rotations_stay_float32_while_a_draft_is_trained(
    made: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfloat16 positions would be others than when it is served."""
    models = []

    def run(name: str, model: torch.nn.Module, *args: object, **kwargs: object) -> None:
        models.append(model)
        raise Begun

    monkeypatch.setattr(recipe, "TrainingRun", run)
    again = Recipe(made.target_folder, made.work, made.prompts, made.held_out, dtype=torch.bfloat16)
    with pytest.raises(Begun):
        again.train(False, TrainingLimit(1), 1.0)
    (model,) = models
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model.rotary.frequencies.dtype == torch.float32


def test_a_shard_without_texts_has_no_states(made: Recipe) -> None:
    states = states_of(made.target, made.layers, [])
    assert states.answers.shape == (0, 3) and len(states.ids) == 0
