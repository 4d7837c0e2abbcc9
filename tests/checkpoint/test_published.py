"""Facts of a model by folder or hub name."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError, NotASafetensorsRepoError
from safetensors.torch import save_file

from sglang_dflash.checkpoint.published import look_up
from sglang_dflash.common.errors import ConfigError
from tests.checkpoint.target_fields import TARGET
from tests.conftest import raw_config


def save_weights(file: Path) -> None:
    import torch

    save_file({"a": torch.zeros(4)}, file)


def test_the_weight_index_is_preferred(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TARGET))
    assert look_up("target", str(tmp_path)).weight_bytes is None
    file = tmp_path / "model-00001-of-00001.safetensors"
    save_weights(file)
    assert look_up("target", str(tmp_path)).weight_bytes == file.stat().st_size
    index = {"metadata": {"total_size": 8}, "weight_map": {"a": file.name}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert look_up("target", str(tmp_path)).weight_bytes == 8


class Hub:
    """Stands for the hub: a config.json, and the shapes of the weights or None."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.folder, self.reachable, self.cached = folder, True, False
        self.shapes: dict[str, list[int]] | None = {}
        for name in ("get_hf_file_metadata", "hf_hub_download", "get_safetensors_metadata"):
            monkeypatch.setattr(huggingface_hub, name, getattr(self, name))

    def get_hf_file_metadata(self, url: str, timeout: float) -> None:
        assert url.endswith("config.json") and timeout <= 10
        if not self.reachable:
            raise httpx.ConnectError("no route")

    def hf_hub_download(self, name: str, file: str, local_files_only: bool = False) -> str:
        if local_files_only and not self.cached:
            raise LocalEntryNotFoundError(f"no {file} of {name}")
        return str(self.folder / file)

    def get_safetensors_metadata(self, name: str) -> Any:
        if self.shapes is None:
            raise NotASafetensorsRepoError(name)
        infos = {
            stored: SimpleNamespace(dtype="BF16", shape=shape, data_offsets=(10 * i, 10 * i + 10))
            for i, (stored, shape) in enumerate(self.shapes.items())
        }
        return SimpleNamespace(files_metadata={"file": SimpleNamespace(tensors=infos)})


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Hub:
    return Hub(monkeypatch, tmp_path)


def test_a_hub_config_is_fetched_and_its_headers_weighed(hub: Hub) -> None:
    (hub.folder / "config.json").write_text(json.dumps(TARGET))
    hub.shapes = {"a": [1], "b": [2]}
    facts = look_up("target", "some/target")
    assert facts.config == TARGET and facts.weight_bytes == 20 and "hub" in facts.source
    assert facts.tensors == {"a": ("BF16", (1,)), "b": ("BF16", (2,))}
    hub.shapes = None
    assert look_up("target", "some/target").weight_bytes is None


def test_a_draft_without_safetensors_on_the_hub_is_refused(hub: Hub) -> None:
    (hub.folder / "config.json").write_text(json.dumps(raw_config()))
    hub.shapes = {"model.fc.weight": [1]}
    assert look_up("draft", "some/draft").tensors == {"fc.weight": ("BF16", (1,))}
    hub.shapes = None
    with pytest.raises(ConfigError, match="draft: 'some/draft'; no safetensors weights"):
        look_up("draft", "some/draft")


def test_without_the_hub_the_cache_is_asked(hub: Hub) -> None:
    (hub.folder / "config.json").write_text(json.dumps(TARGET))
    hub.reachable, hub.cached = False, True
    save_weights(hub.folder / "model.safetensors")
    facts = look_up("target", "some/target")
    assert facts.config == TARGET and "local cache" in facts.source
    assert facts.weight_bytes == (hub.folder / "model.safetensors").stat().st_size
    assert look_up("target", "some/target", offline=True) == facts


@pytest.mark.parametrize("name", ["z-lab/Qwen3-4B-DFlash-b16", "Z-LAB/qwen3-4b-dflash-b16"])
def test_of_a_shipped_name_the_hubs_config_comes_first(hub: Hub, name: str) -> None:
    (hub.folder / "config.json").write_text(json.dumps(raw_config()))
    ours = look_up("draft", name, offline=True)
    assert ours.config != raw_config()
    facts = look_up("draft", name)
    assert (facts.name, facts.config) == (ours.name, raw_config())
    assert "on the hub" in facts.source
    hub.reachable = False
    for hub.cached in (True, False):
        facts = look_up("draft", name)
        assert facts.config == ours.config and facts.weight_bytes == ours.weight_bytes
        assert facts.source == f"{ours.source} Shipped here: the hub did not give its config."


def test_an_earlier_revision_is_not_on_the_hub(hub: Hub) -> None:
    name = "z-lab/Qwen3.5-27B-DFlash@5-layers"
    assert look_up("draft", name) == look_up("draft", name, offline=True)


def test_hub_errors_name_argument_and_value(hub: Hub) -> None:
    hub.reachable = False
    with pytest.raises(
        ConfigError,
        match=r"draft: 'no/such'; it is neither .* \(the hub cannot be reached: no route",
    ):
        look_up("draft", "no/such")
    with pytest.raises(ConfigError, match=r"is in the local cache \(--offline: the hub is not"):
        look_up("draft", "no/such", offline=True)


def test_a_hub_that_does_not_answer_is_asked_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """huggingface_hub retries such a connection for half a minute."""
    asked = []

    def refuse(request: httpx.Request) -> httpx.Response:
        asked.append(request.url)
        raise httpx.ConnectError("no route")

    huggingface_hub.set_client_factory(lambda: httpx.Client(transport=httpx.MockTransport(refuse)))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    try:
        with pytest.raises(ConfigError, match="the hub cannot be reached: no route"):
            look_up("target", "no/such")
    finally:
        from huggingface_hub.utils._http import default_client_factory

        huggingface_hub.set_client_factory(default_client_factory)
    # huggingface_hub also asks for a list of its own, once per process.
    assert len([url for url in asked if "no/such" in str(url)]) == 1 and not slept
