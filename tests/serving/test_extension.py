"""`--speculative-dflash-extension`: found, called with the target worker, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from sglang_dflash.facts.errors import ConfigError
from sglang_dflash.serving.step.extension import Extension, StepObserver, load_extension

HERE = "tests.serving.test_extension"


class Watching(StepObserver):
    def __init__(self, target_worker: Any) -> None:
        self.target_worker = target_worker


def watching(target_worker: Any) -> Extension:
    return Extension(observer=Watching(target_worker))


def not_an_extension(target_worker: Any) -> int:
    return 3


def broken(target_worker: Any) -> Extension:
    raise AttributeError("of the extension's own code")


def test_without_the_flag_nothing_is_added() -> None:
    assert load_extension(None, None).make_drafter is None


def test_the_function_gets_the_target_worker() -> None:
    observer = load_extension(f"{HERE}:watching", "the worker").observer
    assert isinstance(observer, Watching) and observer.target_worker == "the worker"


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no_module_here:f", "cannot be imported"),
        (f"{HERE}:gone", "cannot be imported"),
        (HERE, "give MODULE:FUNCTION"),
        ("a b:f", "cannot be imported"),
        (f"{HERE}:not_an_extension", "returned a int, not an Extension"),
    ],
)
def test_what_is_no_extension_is_refused_by_name(path: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        load_extension(path, None)
    assert (refused.value.field, refused.value.value) == ("extension", path)


def test_an_error_inside_the_extension_is_its_own() -> None:
    with pytest.raises(AttributeError, match="of the extension's own code"):
        load_extension(f"{HERE}:broken", None)
