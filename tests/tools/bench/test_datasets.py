"""The prompts of `sglang-dflash bench`: embedded, of the library, of files, and of a fake hub."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets as hub
import httpx
import pytest

from sglang_dflash.common.errors import ConfigError
from sglang_dflash.tools.bench import datasets
from sglang_dflash.tools.bench.compare import encode_of
from sglang_dflash.tools.bench.datasets import Prompt
from sglang_dflash.tools.bench.settings import BenchSettings
from tests.errors import refused


def test_the_library_functions_are_of_held_out_modules() -> None:
    prompts = datasets.load("stdlib", 1000)
    assert len(prompts) >= 32 and len(set(prompts)) == len(prompts)
    starts = ("def ", "async def ")
    assert all(prompt.turns[0].startswith(starts) and not prompt.chat for prompt in prompts)


def test_fewer_prompts_are_always_the_same_ones() -> None:
    once = datasets.load("demo", 8)
    assert len(once) == 8 and once == datasets.load("demo", 8)
    assert once != datasets.load("demo", 8, seed=1)
    assert len(datasets.load("demo", 10_000, model="hybrid")) == 30


def test_a_file_holds_texts_and_chats(tmp_path: Path) -> None:
    file = tmp_path / "own.jsonl"
    file.write_text('{"prompt": "a b"}\n\n{"turns": ["c", "d"]}\n')
    assert datasets.from_file(file) == [Prompt(("a b",), False), Prompt(("c", "d"), True)]
    # A byte order mark, and characters that end a line of text, and none of JSON.
    file.write_text('\ufeff{"prompt": "a\u2028b\x85c"}\r\n', encoding="utf-8")
    assert datasets.from_file(file) == [Prompt(("a\u2028b\x85c",), False)]
    for bad in ('{"prompt": ""}', '{"turns": []}', '{"turns": "one"}', "[1]", "{", ""):
        file.write_text(bad)
        with pytest.raises(ConfigError) as error:
            datasets.from_file(file)
        shown = bad.strip("[]") if bad == "[1]" else bad
        assert (error.value.field, error.value.value) == ("dataset_file", shown or str(file))
    file.write_text("[1")
    with pytest.raises(ConfigError, match="like a JSON list"):
        datasets.from_file(file)
    file.write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="cannot be read"):
        datasets.from_file(file)
    with pytest.raises(ConfigError, match="no such file"):
        datasets.from_file(tmp_path / "none.jsonl")


CALL = {"id": "1", "type": "function", "function": {"name": "ls", "arguments": '{"path": "."}'}}
RECORDED = [
    {"role": "developer", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": t} for t in ("What is ", "here?")]},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "a.py", "tool_call_id": "1"},
    {"role": "assistant", "content": "One file."},
    {"role": "user", "content": "Its name?"},
]  # fmt: skip


def test_a_recorded_conversation_asks_for_each_answer_after_the_recorded_ones(
    tmp_path: Path,
) -> None:
    file = tmp_path / "agent.jsonl"
    file.write_text(json.dumps({"messages": RECORDED, "tools": [{"type": "function"}]}))
    (prompt,) = datasets.from_file(file)
    assert prompt.chat and prompt.turns == ("What is here?", "a.py", "Its name?")
    assert prompt.tools == ({"type": "function"},)
    # Whatever the model answers, the record goes on as it was.
    sent = [prompt.messages(["own answer"] * i) for i in range(3)]
    assert [len(messages) for messages in sent] == [2, 4, 6]
    assert sent[1][:2] == sent[0] and sent[2][4]["content"] == "One file."
    # As templates read it: a system message, and arguments that are no text.
    assert sent[0][0] == {"role": "system", "content": "Be brief."}
    called = sent[1][2]
    assert called["content"] == "" and called["tool_calls"][0]["function"]["arguments"] == {
        "path": "."
    }
    with pytest.raises(ConfigError, match="as token ids"):
        datasets.encoder(None)(prompt, [])


def test_a_file_of_sharegpt_holds_conversations(tmp_path: Path) -> None:
    file, speakers = tmp_path / "sharegpt.json", ("human", "gpt", "human", "gpt")
    said = [{"from": who, "value": f"{who} {i}"} for i, who in enumerate(speakers)]
    rows = [
        {"id": "a", "conversations": said},
        # There are such: nothing to answer, and an answer to nothing.
        {"id": "b", "conversations": []},
        {"id": "c", "conversations": said[1:]},
    ]
    in_lines = "\n".join(map(json.dumps, rows))
    for text in (json.dumps(rows, indent=1), in_lines):
        file.write_text(text)
        whole, cut = datasets.from_file(file)
        assert whole.turns == ("human 0", "human 2") and cut.turns == ("human 2",)
        assert [one["role"] for one in whole.messages(["own"])] == ["user", "assistant", "user"]
        assert whole.messages(["own"])[1]["content"] == "gpt 1"
    for bad, words in (
        ([{"from": "narrator", "value": "x"}], "line 1: from 'narrator'"),
        ([{"value": "x"}], "line 1: in JSON"),
    ):
        file.write_text(json.dumps({"conversations": bad}))
        with pytest.raises(ConfigError, match=words):
            datasets.from_file(file)
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
    file.write_text(json.dumps({"messages": [image]}))
    with pytest.raises(ConfigError, match="only text content"):
        datasets.from_file(file)


def test_turns_of_a_text_follow_the_answers() -> None:
    assert Prompt(("a", "b", "c"), False).text(["x", "y"]) == "axbyc"


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
def test_rows_of_the_hub_become_chats(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(repository: str, config: str | None, split: str) -> hub.Dataset:
        assert repository.count("/") == 1 and split in ("train", "test")
        return hub.Dataset.from_list([ROWS[name]])

    monkeypatch.setattr(hub, "load_dataset", load_dataset)
    monkeypatch.setattr(datasets, "unreachable", lambda _: None)
    (prompt,) = datasets.load(name, 5)
    assert prompt.chat and "How many?" in prompt.turns[0]
    assert len(prompt.turns) == (2 if name == "mt-bench" else 1)


def test_without_a_network_a_set_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library alone tried for 23 s."""
    asked = list[str]()

    def refuses(url: str, **_: Any) -> None:
        asked.append(url)
        raise httpx.ConnectError("no such host")

    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", refuses)
    monkeypatch.setattr(hub.config, "HF_HUB_OFFLINE", False)
    with pytest.raises(ConfigError, match="the hub cannot be reached: no such host") as error:
        datasets.load("gsm8k", 1)
    assert len(asked) == 1 and "openai/gsm8k" in asked[0]
    assert "or one of demo, stdlib, chat" in str(error.value)


def test_a_set_that_cannot_be_fetched_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*_: Any, **__: Any) -> None:
        raise ConnectionError("no network\nmore")

    monkeypatch.setattr(hub, "load_dataset", offline)
    monkeypatch.setattr(datasets, "unreachable", lambda _: None)
    with refused("dataset", "gsm8k", reason="no network"):
        datasets.load("gsm8k", 1)


def test_a_pair_without_texts_has_no_demo_set(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = SimpleNamespace(prompts=[])
    monkeypatch.setattr(datasets, "demo_pair", {"smollm2": pair}.__getitem__)
    with pytest.raises(ConfigError, match="the pair smollm2 has no texts; chat is for it"):
        datasets.load("demo", 4, model="smollm2")
