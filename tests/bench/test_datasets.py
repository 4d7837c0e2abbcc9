"""The prompts of `sglang-dflash bench`: embedded, of the library, of files, and of a fake hub."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets as hub
import pytest

from sglang_dflash.bench import datasets
from sglang_dflash.bench.compare import encode_of
from sglang_dflash.bench.prompt import Prompt, continued
from sglang_dflash.bench.settings import BenchSettings
from sglang_dflash.facts.embedded import demo_pair
from sglang_dflash.facts.errors import ConfigError


def test_the_library_functions_are_of_held_out_modules() -> None:
    from launch.demo_training.data import HELD_OUT

    assert {name.replace(".", "/") + ".py" for name in datasets.HELD_OUT} == set(HELD_OUT)
    prompts = datasets.load("stdlib", 1000, model=None, cache=Path())
    assert len(prompts) >= 32 and len(set(prompts)) == len(prompts)
    assert all(
        prompt.turns[0].startswith(("def ", "async def ")) and not prompt.chat for prompt in prompts
    )


def test_unseen_text_is_of_files_that_neither_model_has_seen() -> None:
    from launch.demo_training.split import load_split

    held_out = load_split().held_out
    cut = demo_pair("code").cut
    assert {item["file"] for item in cut} <= set(held_out)
    assert all(item["prompt"] in held_out[item["file"]] for item in cut)
    short = datasets.load("unseen", 1000, model=None, cache=Path())
    assert [prompt.turns[0] for prompt in short] != [] and len(short) == len(cut)
    long = datasets.load("unseen-long", 1000, model=None, cache=Path())
    assert len(long) >= 16
    least, most = datasets.LONG_BYTES
    every = "".join(held_out.values())
    for prompt in long:
        assert least - 200 <= len(prompt.turns[0]) <= most and not prompt.chat
        # All lines are theirs: a document is of one file or of several.
        assert all(line in every for line in prompt.turns[0].splitlines(keepends=True))
    assert long == datasets.load("unseen-long", 1000, model=None, cache=Path())


def test_agents_share_prefixes_and_continue_one_text() -> None:
    found = datasets.load("agents", 1000, model=None, cache=Path())
    assert len(found) == len(set(found)) == 16 and not any(prompt.chat for prompt in found)
    header = found[0].turns[0].partition("\n# result")[0]
    assert all(prompt.turns[0].startswith(header) for prompt in found)
    for one, other in zip(found[::2], found[1::2], strict=True):
        same = [a == b for a, b in zip(one.turns, other.turns, strict=True)]
        assert same[:2] == [True, True] and not any(same[2:])
    assert found[:3] == datasets.load("agents", 3, model=None, cache=Path(), seed=5)
    assert continued(Prompt(("a", "b", "c"), False), ["x", "y"]) == "axbyc"


def test_easy_and_hard_texts_take_turns() -> None:
    demo = set(datasets.load("demo", 1000, model="dense", cache=Path()))
    found = datasets.load("alternating", 16, model="dense", cache=Path())
    assert [prompt in demo for prompt in found] == ([True] * 4 + [False] * 4) * 2
    assert len(set(datasets.load("random", 1000, model=None, cache=Path()))) == 64


def test_fewer_prompts_are_always_the_same_ones() -> None:
    once = datasets.load("demo", 8, model="dense", cache=Path())
    assert len(once) == 8 and once == datasets.load("demo", 8, model="dense", cache=Path())
    assert once != datasets.load("demo", 8, model="dense", cache=Path(), seed=1)
    assert len(datasets.load("demo", 10_000, model="hybrid", cache=Path())) == 30


def test_a_file_holds_texts_and_chats(tmp_path: Path) -> None:
    file = tmp_path / "own.jsonl"
    file.write_text('{"prompt": "a b"}\n\n{"turns": ["c", "d"]}\n')
    assert datasets.from_file(file) == [Prompt(("a b",), False), Prompt(("c", "d"), True)]
    for bad in ('{"prompt": ""}', '{"turns": []}', "[1]", "{", ""):
        file.write_text(bad)
        with pytest.raises(ConfigError) as refused:
            datasets.from_file(file)
        assert (refused.value.field, refused.value.value) == ("dataset_file", bad or str(file))
    with pytest.raises(ConfigError, match="no such file"):
        datasets.from_file(tmp_path / "none.jsonl")


def test_chats_are_told_whether_to_think(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    class Tokenizer:
        chat_template, name_or_path = "some", "fake"

        def apply_chat_template(self, messages: list[dict[str, str]], **how: Any) -> str:
            seen.append((messages, how))
            return "chat"

        def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
            return {"input_ids": [len(text)]}

    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", lambda _: Tokenizer())
    chat = {"own": [Prompt(("one", "two"), True)]}
    for thinking, expected in ((None, None), ("on", True), ("off", False)):
        encode = encode_of(BenchSettings(target="t", draft="d", thinking=thinking), chat)
        assert encode(chat["own"][0], ["answer"]) == [4]
        messages, how = seen[-1]
        assert [m["content"] for m in messages] == ["one", "answer", "two"] and how.get(
            "enable_thinking"
        ) is expected


ROWS = {
    "gsm8k": {"question": "How many?"},
    "math500": {"problem": "How many?"},
    "humaneval": {"prompt": "How many?"},
    "mbpp": {"prompt": "How many?", "test_list": ["assert f() == 3"]},
    "mt-bench": {"prompt": ["How many?", "And now?"]},
    "alpaca": {"instruction": "How many?", "input": ""},
}


@pytest.mark.parametrize("name", datasets.HUB)
def test_hub_sets_are_fetched_once(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def load_dataset(repository: str, config: str | None, split: str) -> hub.Dataset:
        asked.append((repository, config, split))
        return hub.Dataset.from_list([ROWS[name]])

    monkeypatch.setattr(hub, "load_dataset", load_dataset)
    for _ in range(2):
        (prompt,) = datasets.load(name, 5, model=None, cache=tmp_path / "cache")
    assert len(asked) == 1 and asked[0][0].count("/") == 1
    assert (
        prompt.chat
        and "How many?" in prompt.turns[0]
        and len(prompt.turns) == (2 if name == "mt-bench" else 1)
    )
    (file,) = (tmp_path / "cache").iterdir()
    assert file.name == f"{name}.jsonl"
    assert json.loads(file.read_text()) == {"turns": list(prompt.turns)}


def test_a_set_that_is_not_available_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def offline(*_: Any, **__: Any) -> None:
        raise ConnectionError("no network\nmore")

    monkeypatch.setattr(hub, "load_dataset", offline)
    for name, reason in (("gsm8k", "no network"), ("nonesuch", "choose from demo, unseen")):
        with pytest.raises(ConfigError, match=reason) as refused:
            datasets.load(name, 1, model=None, cache=tmp_path)
        assert (refused.value.field, refused.value.value) == ("dataset", name)
    assert not list(tmp_path.iterdir())


def test_fetched_sets_lie_in_the_users_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert datasets.default_cache() == Path("/somewhere/sglang-dflash/datasets")
