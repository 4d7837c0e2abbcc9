"""Every broken draft is refused by a server, by `generate` and by `inspect`, with the same line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from sglang_dflash.common.errors import ConfigError
from sglang_dflash.tools import cli
from sglang_dflash.tools.transformers_loop import load
from tests.broken_drafts import (
    BROKEN,
    ONLY_SGLANG,
    PAIR,
    BrokenDraft,
    fields,
    invalid,
    server_flags,
)

TARGET = str(PAIR.target)
DRAFT = "--speculative-draft-model-path"
# Of a message. A path of pytest may take half of it.
LONGEST = 600


def refusals(draft: str, resolve: Any, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The messages of a server, `generate` and `inspect`."""
    with pytest.raises(ConfigError) as by_server:
        resolve(server_flags(draft=draft))
    with pytest.raises(ConfigError) as by_generate:
        load(TARGET, draft)
    capsys.readouterr()
    assert cli.main(["inspect", TARGET, draft, "--offline"]) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    return [
        str(by_server.value),
        str(by_generate.value),
        shown.err.removeprefix("sglang-dflash: ").removesuffix("\n"),
    ]


@pytest.mark.parametrize("what", BROKEN)
def test_all_refuse_a_broken_draft_with_the_same_line(
    what: str,
    resolve: Callable[..., Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And before the target's weights are loaded, which may take minutes."""
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", None)
    draft = BROKEN[what].make(tmp_path / "draft")
    by_server, by_generate, by_inspect = refusals(str(draft), resolve, capsys)
    assert BROKEN[what].message in by_server
    assert "\n" not in by_server and len(by_server) < LONGEST
    assert by_generate == by_server and by_inspect == by_server


@pytest.mark.parametrize("path", ONLY_SGLANG)
def test_a_server_asks_sglang_whether_it_can_read_the_rest(
    path: str, resolve: Callable[..., Any], tmp_path: Path
) -> None:
    """`inspect` does so for a draft of SGLang's worker, and reports others."""
    for number, value in enumerate(ONLY_SGLANG[path]):
        draft = invalid(path, value, {}).make(tmp_path / str(number))
        with pytest.raises(ConfigError, match="SGLang or Transformers cannot read it") as refused:
            resolve(server_flags(draft=draft))
        assert "\n" not in str(refused.value) and len(str(refused.value)) < LONGEST
        is_refused = path.startswith("quantization_config")
        assert cli.main(["inspect", TARGET, str(draft), "--offline"]) == is_refused


def test_the_table_breaks_drafts_that_are_served_otherwise(
    resolve: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    resolve(server_flags())
    load(TARGET, str(PAIR.draft))
    assert cli.main(["inspect", TARGET, str(PAIR.draft), "--offline"]) == 0


NOT_A_FOLDER = {
    "too long": 5000 * "a",
    "too long, with folders": "/".join(600 * ["aaaaaaaa"]),
    "with a null byte": "dra\0ft",
    "absent": "/no/such/draft",
    "of spaces": "a draft",
}


@pytest.mark.parametrize("what", NOT_A_FOLDER)
def test_a_path_that_cannot_be_one_is_named_with_its_flag(
    what: str, resolve: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    messages = refusals(NOT_A_FOLDER[what], resolve, capsys)
    for flag, message in zip((DRAFT, "draft", "DRAFT"), messages, strict=True):
        assert message.startswith(f"{flag}: '")
        assert " is neither a folder here nor " in message or "no such folder here" in message
        assert "\n" not in message and len(message) < 2 * LONGEST


def test_a_swapped_pair_and_one_of_strangers_are_told_alike(
    resolve: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """A server, `generate` and `inspect` tell them, each in its own flags."""
    draft, other = str(PAIR.draft), str(PAIR.draft.parents[1] / "smollm2/draft")
    wrong = "hidden_size in the draft's config.json: 576; the target's is 192 "
    wrong += f"(draft '{other}', target '{TARGET}'): this draft is for another target"
    assert refusals(other, resolve, capsys) == [wrong] * 3
    swapped = "{}: {!r}; this is a draft: give it as {}, and the target here"
    for names, refused in [
        (
            ("--model-path", DRAFT),
            lambda: resolve(server_flags(target=draft, draft=TARGET)),
        ),
        (("target", "draft"), lambda: load(draft, TARGET)),
    ]:
        with pytest.raises(ConfigError) as error:
            refused()
        assert str(error.value) == swapped.format(names[0], draft, names[1])
    assert cli.main(["inspect", draft, TARGET]) == 1
    assert swapped.format("TARGET", draft, "DRAFT") in capsys.readouterr().err


def test_a_file_is_no_draft(
    resolve: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "draft").write_text("")
    messages = refusals(str(tmp_path / "draft"), resolve, capsys)
    assert len(set(messages)) == 1 and "no config.json in" in messages[0]


def test_a_model_that_sglang_does_not_know_is_one_line(
    resolve: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """SGLang's own worker would serve it, if SGLang could read it. `generate` has ours only."""
    draft = BrokenDraft(fields(model_type="nonesuch"), "").make(tmp_path / "draft")
    with pytest.raises(ConfigError) as refused:
        resolve(server_flags(draft=draft))
    error = refused.value
    assert (error.field, error.value) == ("model_type in the draft's config.json", "nonesuch")
    assert "nonesuch" in error.required and "\n" not in str(error)
    assert cli.main(["inspect", TARGET, str(draft), "--offline"]) == 1
    assert str(error) in capsys.readouterr().err
