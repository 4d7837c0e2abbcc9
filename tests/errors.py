"""A refusal is known by the setting or field that it names, and not by its wording."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from sglang_dflash.common.errors import ConfigError

_ANY = object()


@contextmanager
def refused(
    field: str, value: object = _ANY, reason: str = "", error: type[ConfigError] = ConfigError
) -> Iterator[pytest.ExceptionInfo[ConfigError]]:
    """Expect a ConfigError that names the field, and the value if it is given.

    Args:
        reason: a part of what it requires, where one field is refused for several reasons.
    """
    with pytest.raises(error) as raised:
        yield raised
    text = str(raised.value)
    assert raised.value.field == field, text
    assert value is _ANY or raised.value.value == value, text
    assert reason in raised.value.required, text
