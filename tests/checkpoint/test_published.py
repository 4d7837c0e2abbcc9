"""Facts of a model by folder or hub name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sglang_dflash.checkpoint.errors import ConfigError
from sglang_dflash.checkpoint.published import look_up
from tests.checkpoint.target_fields import TARGET


def test_the_weight_index_is_preferred(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TARGET))
    assert look_up("target", str(tmp_path)).weight_bytes is None
    (tmp_path / "model-00001-of-00001.safetensors").write_bytes(b"0" * 10)
    assert look_up("target", str(tmp_path)).weight_bytes == 10
    index = {"metadata": {"total_size": 8}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert look_up("target", str(tmp_path)).weight_bytes == 8


def test_hub_errors_name_argument_and_value(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def refuse(name: str, file: str) -> str:
        raise huggingface_hub.errors.LocalEntryNotFoundError(f"no {file} of {name}")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", refuse)
    with pytest.raises(
        ConfigError, match=r"DRAFT: 'no/such' is neither .* \(no config.json of no/such\)"
    ):
        look_up("draft", "no/such")


def test_a_hub_config_is_fetched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub

    (tmp_path / "config.json").write_text(json.dumps(TARGET))
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda name, file: str(tmp_path / file))
    facts = look_up("target", "some/target")
    assert facts.config == TARGET and facts.weight_bytes is None and "hub" in facts.source
