"""A disk that fails while a draft is loaded: one line that names the file.

The read errors are real: /proc/self/mem is a file that cannot be read at its start.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang_dflash.drafting.weights import load_model
from sglang_dflash.facts.draft_config import DraftConfig
from sglang_dflash.facts.embedded import demo_pair
from sglang_dflash.facts.errors import ConfigError
from sglang_dflash.facts.hub import draft_folder
from tests.conftest import random_model, raw_config

UNREADABLE = Path("/proc/self/mem")

pytestmark = pytest.mark.skipif(not UNREADABLE.exists(), reason="needs Linux")


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    folder = tmp_path / "draft"
    shutil.copytree(demo_pair("dense").draft, folder)
    return folder


def test_the_file_cannot_be_read() -> None:
    with pytest.raises(OSError) as error:
        UNREADABLE.read_bytes()
    assert error.value.errno == errno.EIO


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_read_error_names_the_file(name: str, draft: Path) -> None:
    (draft / name).unlink()
    (draft / name).symlink_to(UNREADABLE)
    with pytest.raises(ConfigError) as error:
        load_model(draft, dtype=torch.float32)
    message = str(error.value)
    assert name in message and "\n" not in message


def test_a_file_that_shrinks_while_it_is_read_is_damaged(draft: Path) -> None:
    """As after a download onto a full disk: the header promises more than there is."""
    file = draft / "model.safetensors"
    os.truncate(file, file.stat().st_size // 2)
    with pytest.raises(ConfigError, match=r"model\.safetensors.*truncated or damaged"):
        load_model(draft, dtype=torch.float32)


def test_a_full_disk_during_a_download_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def full(*_: Any, **__: Any) -> str:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", full)
    with pytest.raises(ConfigError, match="No space left on device") as error:
        draft_folder("--speculative-draft-model-path", "somebody/a-draft")
    assert "\n" not in str(error.value) and "'somebody/a-draft'" in str(error.value)


def test_a_draft_written_to_a_full_disk_is_not_taken_for_whole(tmp_path: Path) -> None:
    """An index that names a file which was never written."""
    from sglang_dflash.drafting.weights import save_model
    from sglang_dflash.facts.tensors import stored_tensors

    raw = raw_config()
    save_model(random_model(raw), raw, tmp_path, torch.float32)
    index = {"weight_map": {"fc.weight": "model-00002-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert DraftConfig.from_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"model-00002-of-00002\.safetensors.*download it again"):
        stored_tensors(tmp_path)
