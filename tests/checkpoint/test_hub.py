"""Files of the hub in the local cache."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang_dflash.checkpoint.hub import cached_config


@pytest.mark.parametrize("name", ["x" * 5000, "a/b/c", "a/b"], ids=["long", "deep", "new"])
def test_a_name_that_is_no_folder_and_not_in_the_cache_has_no_config(name: str) -> None:
    assert cached_config(name) is None


def test_a_repository_without_one_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers, when it was told so, notes it in the cache."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--owner--name"
    for file, text in ("refs/main", "abc"), (".no_exist/abc/config.json", ""):
        (repository / file).parent.mkdir(parents=True)
        (repository / file).write_text(text)
    assert cached_config("owner/name") is None
    (repository / ".no_exist/abc/config.json").unlink()
    (repository / "snapshots/abc").mkdir(parents=True)
    (repository / "snapshots/abc/config.json").write_text("{}")
    assert cached_config("owner/name") == repository / "snapshots/abc/config.json"


def test_a_folder_has_its_own(tmp_path: Path) -> None:
    assert cached_config(str(tmp_path)) is None
    (tmp_path / "config.json").write_text("{}")
    assert cached_config(str(tmp_path)) == tmp_path / "config.json"
