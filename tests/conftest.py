"""Shared by all tests: their tiers, small random draft checkpoints, and Triton's interpreter on a
machine without a GPU."""

from __future__ import annotations

import gc
import importlib
import os
import pkgutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from sglang_dflash.checkpoint.draft_config import DraftConfig, LayerGroup
from sglang_dflash.drafting.attention.backend import DraftAttention
from sglang_dflash.drafting.attention.reference import TorchAttention
from sglang_dflash.drafting.groups import KVGroup
from sglang_dflash.drafting.kv import DraftKVCache, store_
from sglang_dflash.drafting.kv.ring import RingKVCache
from sglang_dflash.drafting.kv.tagged import TaggedKVCache
from sglang_dflash.drafting.model import DraftModel
from sglang_dflash.drafting.options import ResolvedOptions

if not torch.cuda.is_available():
    # Triton reads it when a kernel is defined, those of its own language included: set it before
    # anything else imports Triton. Unset it then, so that no server of a test inherits it.
    os.environ["TRITON_INTERPRET"] = "1"
    import dflash_kernels

    for module in pkgutil.iter_modules(dflash_kernels.__path__):
        importlib.import_module(f"dflash_kernels.{module.name}")

    del os.environ["TRITON_INTERPRET"]


KERNELS, ENGINE = (Path(__file__).parent / name for name in ("kernels", "engine"))
# Tiers that take many minutes, or need a GPU for whole servers.
ON_REQUEST = ("long", "compile", "gpu")
# So many times as many inputs are drawn by the tests that draw them (docs/reliability.md).
FUZZ = int(os.environ.get("SGLANG_DFLASH_FUZZ", "1"))
# The variable that names a folder shared by the processes of one test session.
SHARED_FOLDER = "SGLANG_DFLASH_TEST_FOLDER"


def pytest_configure(config: pytest.Config) -> None:
    # Until the tests are collected: imports leave little garbage, and searching takes seconds.
    gc.disable()
    config.add_cleanup(gc.enable)
    # A GPU may be lent without these plugins.
    for plugin, marker in (("xdist", "xdist_group(name)"), ("timeout", "timeout(seconds)")):
        if not config.pluginmanager.hasplugin(plugin):
            config.addinivalue_line("markers", f"{marker}: {plugin} is not installed")
    if SHARED_FOLDER not in os.environ:
        folder = tempfile.TemporaryDirectory(prefix="sglang-dflash-tests-")
        # The processes of `pytest -n 2` inherit it.
        os.environ[SHARED_FOLDER] = folder.name
        config.add_cleanup(lambda: os.environ.pop(SHARED_FOLDER))
        config.add_cleanup(folder.cleanup)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip folders without a fast test under `-m fast`: to import them takes seconds."""
    if config.getoption("markexpr") == "fast" and collection_path in (KERNELS, ENGINE):
        return True
    return None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests of kernels are `kernels`, on a machine with CUDA also `gpu`. What is in no other tier
    either is `fast`; for `engine` see tests/engine/conftest.py. Tests that name a tier of
    `ON_REQUEST` themselves, which those of kernels do not, are left out unless -m names it."""
    asked = config.getoption("markexpr")
    unnamed = {tier for tier in ON_REQUEST if tier not in asked}
    left_out = [item for item in items if unnamed & {mark.name for mark in item.iter_markers()}]
    for item in items:
        if not any(item.get_closest_marker(tier) for tier in ("engine", "compile")):
            is_kernel = KERNELS in item.path.parents
            item.add_marker(pytest.mark.kernels if is_kernel else pytest.mark.fast)
            if is_kernel and torch.cuda.is_available():
                item.add_marker(pytest.mark.gpu)
            if not item.get_closest_marker("xdist_group"):
                # One request to a process for each file instead of each test.
                item.add_marker(pytest.mark.xdist_group(item.nodeid.partition("::")[0]))
    kept = set(items) - set(left_out)
    items[:] = [item for item in items if item in kept]
    config.hook.pytest_deselected(items=left_out)


def pytest_collection_finish() -> None:
    """Keep what collection imported out of later garbage collections: SGLang collects whenever it
    measures memory."""
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def raw_config(**changes: Any) -> dict[str, Any]:
    """config.json of a tiny draft in the published layout."""
    own = {"mask_token_id": 63, "target_layer_ids": [1, 3]}
    raw = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 4096,
        "vocab_size": 64,
        "block_size": 4,
        "num_target_layers": 6,
        "dflash_config": own,
    }
    return {**raw, **changes}


def with_own(**own: Any) -> dict[str, Any]:
    """Its `dflash_config` with more fields."""
    return {"dflash_config": {**raw_config()["dflash_config"], **own}}


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Change the tensors of a checkpoint of one file."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file)


def random_model(raw: dict[str, Any]) -> DraftModel:
    """A draft with random weights of a size at which attention and norms matter."""
    model = DraftModel(DraftConfig.from_dict(raw))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3 if parameter.ndim == 2 else 1.0)
    if model.config.draft_vocab_size is not None:
        tokens = torch.randperm(model.config.vocab_size)[: model.config.draft_vocab_size]
        model.token_ids = tokens.sort().values
    return model


def kv_groups(
    model: DraftModel,
    options: ResolvedOptions,
    slots: int,
    entries: int | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    attention: Callable[[LayerGroup], DraftAttention] | None = None,
    tagged: bool = False,
) -> list[KVGroup]:
    """Draft KV caches over that many target slots, as beside a hierarchical cache if `tagged`.
    Layers that do not read the whole context have rings of `entries`, if given."""
    device, found = model.device, []
    for layer_group in model.config.groups(options.reach):
        shape = layer_group.kv_shape(model.kv_shape)
        cache = (TaggedKVCache if tagged else DraftKVCache)(slots, shape, dtype, device)
        if entries is not None and layer_group.reach.is_bounded:
            place = model.ops.place_in_ring
            cache = RingKVCache(entries, slots, shape, dtype, device, place=place)
        torch_attention = TorchAttention(layer_group.attentions, options.draft_block)
        group_attention = attention(layer_group) if attention else torch_attention
        found.append(KVGroup(layer_group, cache, group_attention))
    return found


def write_kv(
    cache: DraftKVCache,
    slots: torch.Tensor,
    kv: torch.Tensor,
    live: torch.Tensor | None = None,
    fair_share: int | None = None,
) -> None:
    """Enter tokens, see `DraftKVCache.place`, and store their K/V `[N, L, 2, G, D]`."""
    store_(cache.kv, cache.place(slots, live, fair_share), kv)
