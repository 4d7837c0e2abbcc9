"""Files of the hub in the local cache."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang_dflash.checkpoint.hub import cached_config


@pytest.mark.parametrize("name", ["x" * 5000, "a/b/c", "a/b"], ids=["long", "deep", "new"])
def test_a_name_that_is_no_folder_and_not_in_the_cache_has_no_config(name: str) -> None:
    assert cached_config(name) is None


def test_a_folder_has_its_own(tmp_path: Path) -> None:
    assert cached_config(str(tmp_path)) is None
    (tmp_path / "config.json").write_text("{}")
    assert cached_config(str(tmp_path)) == tmp_path / "config.json"
