"""The reader of config.json fields: merging, types and messages."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest

from sglang_dflash.checkpoint.fields import Fields
from sglang_dflash.common.errors import ConfigError
from tests.errors import refused

RAW = {
    "hidden_size": 8,
    "block_size": 4,
    "text_config": {"hidden_size": 16, "head_dim": None},
    "dflash_config": {"block_size": 6},
}


def test_a_section_overrides_the_top_level() -> None:
    text = Fields.of(RAW, "draft")
    assert (text.positive_int("hidden_size"), text.positive_int("block_size")) == (16, 4)
    own = Fields.of(RAW, "draft", section="dflash_config")
    assert (own.positive_int("hidden_size"), own.positive_int("block_size")) == (8, 6)
    assert Fields.of(RAW, "draft", section=None).positive_int("block_size") == 4
    assert Fields.of({"text_config": None, "depth": 2}, "draft").positive_int("depth") == 2


def test_null_counts_as_missing() -> None:
    fields = Fields.of(RAW, "draft")
    assert "head_dim" not in fields and "hidden_size" in fields
    assert fields.positive_int("head_dim", default=5) == 5


READERS: dict[str, tuple[Callable[[Fields], Any], Any, list[Any], str]] = {
    "positive_int": (lambda f: f.positive_int("x"), 1, [0, -1, True, 1.0, "1"], "positive integer"),
    "positive_number": (
        lambda f: f.positive_number("x"),
        0.5,
        [0, -0.5, True, float("nan"), float("inf"), "0.5"],
        "positive number",
    ),
    "integer": (lambda f: f.integer("x", 28), -1, ["28", 2.5, True, [28]], "an integer"),
    "token_id": (lambda f: f.token_id("x"), 0, [-1, False, 0.0, "0"], "token id"),
    "flag": (lambda f: f.flag("x", default=False), True, [0, 1, "yes"], "true or false"),
    "layer_ids": (
        lambda f: f.layer_ids("x", 4),
        (0, 3),
        [[], 3, [True], [1.0], "12"],
        "non-empty list of layer ids",
    ),
    "block": (lambda f: f.block("x").values, {"y": 1}, [[], 0, "y"], "an object"),
}


@pytest.mark.parametrize("reader", READERS)
def test_a_value_of_another_type_is_refused(reader: str) -> None:
    read, valid, invalid, required = READERS[reader]
    assert read(Fields.of({"x": valid}, "draft")) == valid
    for value in invalid:
        with refused("x in the draft's config.json") as caught:
            read(Fields.of({"x": value}, "draft"))
        assert repr(caught.value.value) == repr(value)
        assert required in caught.value.required


def test_errors_give_the_path_and_the_file() -> None:
    nested = Fields.of({"text_config": {"rope": {"theta": 0}, "depth": 0}}, "target")
    for read, field, value in (
        (lambda: nested.positive_int("depth"), "text_config.depth", 0),
        (lambda: nested.block("rope").positive_number("theta"), "text_config.rope.theta", 0),
        (lambda: nested.positive_int("width"), "width", ...),
        (lambda: Fields.of({"text_config": 3}, "target"), "text_config", 3),
    ):
        with refused(f"{field} in the target's config.json", value):
            read()


def test_an_error_without_a_value_is_the_same_in_another_process() -> None:
    """Ranks send each other what refuses a draft."""
    error = ConfigError("width in the target's config.json", required="missing; give {window}")
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error) and vars(again) == vars(error)
    assert str(again.named({"window": "--window"})).endswith(": missing; give --window")
