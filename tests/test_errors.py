"""A ConfigError names the field and its value, and tells what would be right."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from sglang_dflash.common.errors import ConfigError, UnsupportedDraft
from tests.errors import refused
from tests.test_imports import FILES, name_of, nodes


def test_its_message_has_the_field_the_value_and_what_is_required() -> None:
    error = UnsupportedDraft("window", 3, "give at least 4, or leave {sinks} out")
    assert str(error) == "window: 3; give at least 4, or leave sinks out"
    named = error.named({"window": "--window", "sinks": "--sinks"})
    assert str(named) == "--window: 3; give at least 4, or leave --sinks out"
    assert (type(named), named.value) == (UnsupportedDraft, 3)
    assert str(ConfigError("window", None, "give one")) == "window: None; give one"
    assert str(ConfigError("window", required="missing")) == "window: missing"


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_every_one_tells_what_is_required(path: Path) -> None:
    for call in nodes(path, ast.Call):
        if getattr(call.func, "id", "") in ("ConfigError", "UnsupportedDraft"):
            has_required = len(call.args) == 3 or "required" in {k.arg for k in call.keywords}
            starred = any(isinstance(argument, ast.Starred) for argument in call.args)
            assert has_required or starred, call.lineno


def test_a_refusal_is_told_from_another() -> None:
    def attempt(field: str, value: object, **wanted: str) -> None:
        with refused(field, value, **wanted):
            raise ConfigError("window", 3, "at least 4 is required")

    attempt("window", 3, reason="at least 4")
    for wrong in (("sinks", 3, ""), ("window", 4, ""), ("window", 3, "at most")):
        with pytest.raises(AssertionError):
            attempt(wrong[0], wrong[1], reason=wrong[2])
