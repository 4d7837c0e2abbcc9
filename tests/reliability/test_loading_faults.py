"""A disk that fails while a draft is loaded: one line that names the file. (Files that are cut or
missing: tests/broken_drafts.py.)

The read errors are real: /proc/self/mem is a file that cannot be read at its start.
"""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang_dflash.checkpoint.hub import draft_folder
from sglang_dflash.common.errors import ConfigError
from sglang_dflash.drafting.weights import load_model
from sglang_dflash.tools.demo_pairs.pairs import demo_pair

UNREADABLE = Path("/proc/self/mem")

pytestmark = pytest.mark.skipif(not UNREADABLE.exists(), reason="needs Linux")


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    folder = tmp_path / "draft"
    shutil.copytree(demo_pair("dense").draft, folder)
    return folder


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_read_error_names_the_file(name: str, draft: Path) -> None:
    (draft / name).unlink()
    (draft / name).symlink_to(UNREADABLE)
    with pytest.raises(ConfigError) as error:
        load_model(draft, dtype=torch.float32)
    message = str(error.value)
    assert name in message and "\n" not in message


def test_a_folder_that_cannot_be_listed_is_named(
    draft: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(_: Path) -> Any:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(Path, "iterdir", denied)
    with pytest.raises(ConfigError, match="cannot be read: Permission denied") as error:
        draft_folder(str(draft))
    assert error.value.value == str(draft)


def test_a_full_disk_during_a_download_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def full(*_: Any, **__: Any) -> str:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", full)
    with pytest.raises(ConfigError, match="No space left on device") as error:
        draft_folder("somebody/a-draft")
    assert "\n" not in str(error.value) and "'somebody/a-draft'" in str(error.value)
