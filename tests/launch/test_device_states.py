"""States in memory, as on a GPU, in place of files: of texts of random tokens."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from launch.draft_training import card, draft, loop, states
from launch.draft_training.loop import TrainingLimit
from launch.draft_training.recipe import Recipe
from sglang_dflash.tools.bench.datasets import Prompt
from tests.launch.small_target import write_target

TENSORS = ("begins", "answers", "ids", "hidden", "likely", "log_p")


def rows_of(count: int, seed: int) -> list[dict[str, Any]]:
    """Texts of 12 to 60 tokens with one or two answers."""
    rng = random.Random(seed)
    rows = []
    for _ in range(count):
        ids = [rng.randrange(3, 1000) for _ in range(rng.randrange(12, 60))]
        spans = [(4, 7), (9, len(ids))][rng.randrange(2) :]
        rows.append({"kind": "chat", "sampled": False, "ids": ids, "answers": spans})
    return rows


def write_text(work: Path, shards: int) -> None:
    (work / "text").mkdir(parents=True)
    for shard in range(shards):
        lines = [{"chats": 9, "spent": 1.0}, *rows_of(9, shard)]
        text = "".join(f"{json.dumps(line)}\n" for line in lines)
        (work / f"text/{shard:04}.jsonl").write_text(text)


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("target"))


def recipe_of(target: Path, work: Path, **more: Any) -> Recipe:
    prompts = {"chat": [Prompt(("Name a color.",), True)]}
    return Recipe(target, work, (), prompts, dtype=torch.float32, **more)


def test_states_in_memory_are_those_of_the_files(
    target_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In batches by tokens as well, and of each shard once."""
    write_text(tmp_path, 2)
    wanted = recipe_of(target_folder, tmp_path).shards()
    monkeypatch.setitem(states.ROWS, "cpu", 100)
    monkeypatch.setitem(states.TOKENS, "cpu", 130)
    held = recipe_of(target_folder, tmp_path / "held", states_in_memory=True)
    (tmp_path / "text").rename(tmp_path / "held/text")
    found = held.shards()
    assert len(found) == len(wanted) == 2 and not list(tmp_path.glob("held/states/*.pt"))
    for own, of in zip(found, wanted, strict=True):
        assert own.kinds == of.kinds
        for name in TENSORS:
            torch.testing.assert_close(getattr(own, name), getattr(of, name), atol=0.01, rtol=0.02)
        each = states.bytes_of_token(held.target, held.layers)
        assert own.bytes == each * len(own.ids)
    assert [id(of) for of in held.shards()] == [id(of) for of in found]
    assert card._seconds_of(held.work / "states") > 0


def test_batches_are_of_like_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(states.TOKENS, "cpu", 12)
    found = list(states._batches([9, 3, 4, 40, 3], torch.device("cpu")))
    assert found == [[1, 4, 2], [0], [3]]


def test_text_that_memory_has_no_room_for_is_left_out(
    target_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_text(tmp_path, 3)
    held = recipe_of(target_folder, tmp_path, states_in_memory=True, max_state_bytes=1)
    assert len(held.shards()) == len(held.shards()) == 1
    assert capsys.readouterr().out.count("not loaded") == 1


def gathered(picked: list[tuple[states.States, int]]) -> list[torch.Tensor]:
    """A batch of slices, padded."""
    found = []
    for shard, i in picked:
        text, _, end = shard.answers[i].tolist()
        own = slice(int(shard.begins[text]), int(shard.begins[text]) + end)
        found.append([getattr(shard, name)[own] for name in ("ids", "hidden", "likely", "log_p")])
    return [
        torch.nn.utils.rnn.pad_sequence(list(of), batch_first=True)
        for of in zip(*found, strict=True)
    ]


def test_a_batch_is_the_texts_padded_with_zeros(target_folder: Path, tmp_path: Path) -> None:
    write_text(tmp_path, 3)
    shards = recipe_of(target_folder, tmp_path, states_in_memory=True).shards()
    rng = random.Random(0)
    for count in (1, 2, 7):
        picked = [(s, rng.randrange(len(s.answers))) for s in rng.choices(shards, k=count)]
        anchors = torch.randint(0, 9, (count, 5))
        batch = draft.gather(picked, anchors)
        ids, hidden, likely, log_p = gathered(picked)
        assert torch.equal(batch.ids, ids) and torch.equal(batch.hidden, hidden)
        assert torch.equal(batch.likely, likely.long())
        assert torch.equal(batch.log_p, log_p.float())
        assert torch.equal(batch.anchors, anchors)
        assert batch.ends.tolist() == [int(s.answers[i, 2]) for s, i in picked]


def test_blocks_are_drawn_inside_of_answers(target_folder: Path, tmp_path: Path) -> None:
    write_text(tmp_path, 3)
    shards = recipe_of(target_folder, tmp_path, states_in_memory=True).shards()
    ends = {int(end) for shard in shards for end in shard.answers[:, 2]}
    seen = set()
    for seed in range(30):
        batch = draft.draw(shards, 6, 8, random.Random(seed))
        assert batch.ids.shape[0] == 6 and batch.anchors.shape == (6, 8)
        assert (batch.anchors >= 4).all() and (batch.anchors < batch.ends[:, None] - 1).all()
        seen |= set(batch.ends.tolist())
    assert seen == ends


def test_a_draft_is_trained_for_some_minutes(
    target_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From states in memory; a milestone that was lost is made again, and the best one is kept."""
    # A step takes one tick of this clock, whatever the machine does.
    ticks = itertools.count()
    monkeypatch.setattr(loop, "now", lambda device: 0.04 * next(ticks))
    write_text(tmp_path, 2)
    made = recipe_of(target_folder, tmp_path, states_in_memory=True)
    made.train(False, TrainingLimit(seconds=0.5), 0.3)
    file = tmp_path / "draft.curve.json"
    curve = json.loads(file.read_text())
    assert len(curve) > 1 and curve[-1]["shards"] == 2
    file.write_text(json.dumps(curve[:-1]))
    made.train(False, TrainingLimit(seconds=0.5), 0.3)
    again = json.loads(file.read_text())
    assert [row["step"] for row in again] == [row["step"] for row in curve]
    for row, best in ((0, 3.0), (-1, 2.0)):
        again[row]["held_out"] = {"a": best, "b": 1.0}
    file.write_text(json.dumps(again))
    step, folder = card.best_milestone(made, "draft")
    assert step == again[0]["step"] and folder.name == f"draft-{step:06}"
