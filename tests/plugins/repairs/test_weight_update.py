"""Folders that `/update_weights_from_disk` takes, without a server."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_dflash.common.errors import ConfigError
from sglang_dflash.plugins.repairs.weight_update import check_and_update, check_folder, check_format
from sglang_dflash.tools.demo_pairs.pairs import demo_pair
from tests.conftest import rewrite
from tests.errors import refused

PAIR = demo_pair("dense")
Tensors = dict[str, torch.Tensor]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the served target."""
    copy = tmp_path / "target"
    shutil.copytree(PAIR.target, copy)
    return copy


def manager_of(served: Path | str) -> Any:
    """The part of SGLang's manager that is read, of a server of that checkpoint."""
    given = SimpleNamespace(revision=None, download_dir=None, speculative_draft_model_path=None)
    return SimpleNamespace(server_args=given, model_path=str(served))


def transpose_a_projection(tensors: Tensors) -> None:
    name = next(n for n in tensors if n.endswith("layers.0.mlp.up_proj.weight"))
    tensors[name] = tensors[name].T.contiguous()


def drop_a_norm(tensors: Tensors) -> None:
    tensors.pop(next(n for n in tensors if n.endswith("layers.1.input_layernorm.weight")))


BAD: dict[str, tuple[Callable[[Tensors], object], str]] = {
    "shape": (transpose_a_projection, r"layers\.0\.mlp\.up_proj\.weight is \[192, \d+\], the serv"),
    "missing": (drop_a_norm, r"tensor 'layers\.1\.input_layernorm\.weight' of the served model"),
    "more": (lambda t: t.update(extra=torch.zeros(1)), r"tensor 'extra' is not the served"),
}


@pytest.mark.parametrize("what", BAD)
def test_other_tensors_are_refused(what: str, folder: Path) -> None:
    change, message = BAD[what]
    rewrite(folder, change)
    with pytest.raises(ConfigError, match=message):
        check_folder(str(folder), manager_of(PAIR.target))


MTP = ("mtp.fc.weight", "model.mtp.layers.0.mlp.up_proj.weight", "model.layers.{}.eh_proj.weight")


@pytest.mark.parametrize("name", MTP)
@pytest.mark.parametrize("section", [None, "text_config"])
def test_layers_that_predict_further_tokens_may_be_missing(
    name: str, section: str | None, folder: Path
) -> None:
    """A published checkpoint has them, one that Transformers has saved has not. SGLang reads
    neither those of Qwen3.5, by their names, nor those of DeepSeek, the last layers."""
    config = json.loads((folder / "config.json").read_text())
    depth = config["num_hidden_layers"]
    if section is not None:
        config = {"architectures": config["architectures"], section: config}
        del config[section]["architectures"]
    (folder / "config.json").write_text(json.dumps(config))
    saved = shutil.copytree(folder, folder.parent / "saved")
    rewrite(folder, lambda tensors: tensors.update({name.format(depth): torch.zeros(1)}))
    check_folder(str(saved), manager_of(folder))
    check_folder(str(folder), manager_of(saved))
    rewrite(Path(saved), drop_a_norm)
    with pytest.raises(ConfigError, match="no tensor 'layers"):
        check_folder(str(saved), manager_of(folder))


def test_the_draft_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"holds \['DFlash\w*'\]; the served model is \['Qwen3"):
        check_folder(str(PAIR.draft), manager_of(PAIR.target))


def test_a_folder_without_a_config_or_weights_is_refused(folder: Path) -> None:
    (folder / "config.json").rename(folder / "else.json")
    with pytest.raises(ConfigError, match=r"no config\.json"):
        check_folder(str(folder), manager_of(PAIR.target))
    (folder / "else.json").rename(folder / "config.json")
    next(folder.glob("*.safetensors")).unlink()
    with pytest.raises(ConfigError, match=r"no \.safetensors file"):
        check_folder(str(folder), manager_of(PAIR.target))


@pytest.mark.parametrize("name", [5000 * "a", "dra\0ft", "/no/such/folder"])
def test_what_cannot_be_had_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="neither a folder here nor on the hub"):
        check_folder(name, manager_of(PAIR.target))


@pytest.mark.parametrize("served", ["s3://a-bucket/a-model", "a-name/on-modelscope"])
def test_new_weights_are_taken_if_the_served_ones_cannot_be_read(
    served: str, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The log says so once, with the reason."""
    manager = manager_of(served)

    async def original(*_: Any) -> tuple[bool, str, int]:
        return True, "updated", 0

    for _ in range(2):
        update = SimpleNamespace(model_path=str(folder), load_format=None)
        assert asyncio.run(check_and_update(original, manager, update)) == (True, "updated", 0)
    (warning,) = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert "checks nothing of new weights: served model" in warning and served in warning


def test_names_on_the_hub_are_compared(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places = {"a/target": str(folder), "a/draft": str(PAIR.draft)}
    fetched = "sglang_dflash.plugins.repairs.weight_update.snapshot_download"
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(fetched, lambda name, **where: asked.append(where) or places[name])
    check_folder("a/target", manager_of(PAIR.target))
    given = SimpleNamespace(revision="a-revision", download_dir="/models")
    manager = SimpleNamespace(server_args=given, model_path="a/target")
    update = SimpleNamespace(model_path=str(PAIR.target), load_format=None)

    async def original(*_: Any) -> str:
        return "updated"

    assert asyncio.run(check_and_update(original, manager, update)) == "updated"
    new, served = asked
    assert "local_files_only" not in new
    # Nothing is fetched, from where SGLang has loaded it.
    del served["allow_patterns"]
    assert served == {
        "revision": "a-revision", "cache_dir": "/models", "local_files_only": True,
    }  # fmt: skip
    with pytest.raises(ConfigError, match="DFlash"):
        check_folder("a/draft", manager_of("a/target"))


@pytest.mark.parametrize("load_format", ["nonesuch", "npcache", "pt", "dummy", ""])
def test_formats_that_cannot_be_compared_are_refused(load_format: str) -> None:
    with refused("load_format", load_format):
        check_format(load_format)
    check_format(None), check_format("auto"), check_format("safetensors")


def test_weights_of_the_same_model_are_taken(folder: Path) -> None:
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, "max_position_embeddings": 1}))
    rewrite(folder, lambda tensors: [tensor.mul_(2) for tensor in tensors.values()])
    check_folder(str(folder), manager_of(PAIR.target))


def test_the_folder_of_earlier_weights_may_be_gone(folder: Path, tmp_path: Path) -> None:
    """SGLang notes the folder of each update as the served model's."""
    manager = manager_of(PAIR.target)

    async def original(manager: Any, obj: Any, _: Any) -> tuple[bool, str, int]:
        manager.model_path = obj.model_path
        return True, "updated", 0

    def update(number: int) -> tuple[bool, str, int]:
        step = Path(shutil.copytree(folder, tmp_path / str(number)))
        shutil.rmtree(tmp_path / str(number - 1), ignore_errors=True)
        obj = SimpleNamespace(model_path=str(step), load_format=None)
        return asyncio.run(check_and_update(original, manager, obj))

    assert [update(number)[1] for number in range(3)] == ["updated"] * 3
    rewrite(folder, drop_a_norm)
    success, message, _ = update(3)
    assert not success and "no tensor" in message


@pytest.mark.parametrize("states", [[{"dflash": {}}], [{"dflash_builtin_reason": "a flag"}]])
def test_a_drafts_folder_goes_to_the_worker_that_takes_it(states: list[dict[str, Any]]) -> None:
    """SGLang's worker would load it into the target."""

    async def get_internal_state() -> list[dict[str, Any]]:
        return states

    async def original(*_: Any) -> tuple[bool, str, int]:
        return True, "updated", 0

    given = SimpleNamespace(
        speculative_draft_model_path=str(PAIR.draft), revision=None, download_dir=None
    )
    manager: Any = SimpleNamespace(
        server_args=given, get_internal_state=get_internal_state, model_path=str(PAIR.target)
    )
    update = SimpleNamespace(model_path=str(PAIR.draft), load_format=None)
    success, message, _ = asyncio.run(check_and_update(original, manager, update))
    assert success is ("dflash" in states[0])
    assert success or "the served model is" in message
