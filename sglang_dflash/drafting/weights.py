"""Read and write published DFlash checkpoints. Every tensor is used once or named in an error."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from sglang_dflash.checkpoint.draft_config import DraftConfig
from sglang_dflash.checkpoint.stored import StoredTensor, each_tensor, stored_tensors
from sglang_dflash.checkpoint.tensors import (
    check_tensors,
    check_weights,
    expected_tensors,
    fused_tensors,
    layout,
    quantized_modules,
)
from sglang_dflash.checkpoint.vocabulary import D2T, T2D, token_ids
from sglang_dflash.common.errors import ConfigError
from sglang_dflash.common.log import Log
from sglang_dflash.drafting.dequantize import STORED_DTYPES, dequantized
from sglang_dflash.drafting.model import DraftModel
from sglang_dflash.drafting.ops import TorchOps
from sglang_dflash.drafting.packed import PackedLinear, plain_weight
from sglang_dflash.drafting.parallel import TensorParallel
from sglang_dflash.drafting.rope import Rotary

logger = Log(__name__)


def read_tensors(folder: str | Path) -> dict[str, Tensor]:
    """All tensors of the safetensors files in `folder`, on the CPU, by name.

    Raises:
        ConfigError: there is no such file, a file is damaged, or two files hold the same name.
    """
    return {
        name: opened.get_tensor(stored)
        for name, stored, opened in each_tensor(folder, framework="pt")
    }


def draft_tensors(config: DraftConfig, folder: str | Path, dtype: torch.dtype) -> dict[str, Tensor]:
    """The tensors in `folder` by their published names: of quantized modules the weights, in that
    dtype, and of fused modules each one.

    Raises:
        ConfigError: as `read_tensors`, or the values of a quantized module are none of a weight.
    """
    tensors = read_tensors(folder)
    if config.quantization is not None:
        tensors = dequantized(config.quantization, tensors, dtype)
    for name, parts in fused_tensors(config).items():
        if name in tensors:
            rows = tensors.pop(name).split([part.shape[0] for part in parts])
            tensors |= {part.name: weight for part, weight in zip(parts, rows, strict=True)}
    return tensors


def load_state(
    config: DraftConfig, tensors: Mapping[str, Tensor], tp: TensorParallel
) -> dict[str, Tensor]:
    """This rank's state dict from whole tensors, those of the config."""
    state = {}
    for ours, parts in layout(config).items():
        shards = [_shard(tensors[part.name], part.split, config, tp) for part in parts]
        state[ours] = shards[0] if len(shards) == 1 else torch.cat(shards)
    return state


def _shard(tensor: Tensor, split: str | None, config: DraftConfig, tp: TensorParallel) -> Tensor:
    """This rank's part of a checkpoint tensor."""
    if split == "columns":
        return tensor.chunk(tp.size, dim=1)[tp.rank].contiguous()
    if split == "rows":
        return tensor.chunk(tp.size)[tp.rank]
    if split == "kv rows":
        # With fewer kv heads than ranks, neighboring ranks hold replicas of the kv head that
        # their query heads share.
        kv_parts = min(tp.size, config.num_key_value_heads)
        return tensor.chunk(kv_parts)[tp.rank * kv_parts // tp.size]
    return tensor


def load_model(
    folder: str | Path,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    tp: TensorParallel | None = None,
    ops: TorchOps | None = None,
    dummy: bool = False,
    model_class: type[DraftModel] = DraftModel,
) -> DraftModel:
    """Read a draft checkpoint's folder into a frozen network with these `ops`; None for torch's.

    Args:
        model_class: its class.
        dummy: for timing: of the folder only config.json is read, and weights are random, normal
            with standard deviation 0.02; norms are 1 and biases 0.

    Raises:
        ConfigError: see `DraftConfig.from_pretrained` and `checkpoint.tensors.check_weights`.
    """
    config, tp = DraftConfig.from_pretrained(folder), tp or TensorParallel()
    with torch.device("meta"):
        model = model_class(config, tp, ops)
    if dummy:
        state = _random_state(model, dtype, device)
    else:
        check_weights(config, folder)
        tensors = draft_tensors(config, folder, dtype)
        state = load_state(config, tensors, tp)
        state = {name: tensor.to(device=device, dtype=dtype) for name, tensor in state.items()}
    model.load_state_dict(state, assign=True)
    # No checkpoint holds this buffer. It stays float32 for weights of any dtype.
    model.rotary = Rotary(config.rope, config.head_dim, config.max_position_embeddings).to(device)
    if config.draft_vocab_size is not None:
        if dummy:
            ids = torch.arange(config.draft_vocab_size)
        else:
            maps = {name: tensors[name].numpy() for name in (D2T, T2D) if name in tensors}
            ids = torch.from_numpy(token_ids(config, maps))
        model.token_ids = ids.to(device)
    if config.quantization is not None and not dummy and tp.rank == 0:
        _tell_dequantized(model, len(quantized_modules(config, stored_tensors(folder))))
    return model.freeze()


def _tell_dequantized(model: DraftModel, modules: int) -> None:
    quantization = model.config.quantization
    if not modules:
        logger.warning("the draft is said to be quantized, %s: no tensor of it is", quantization)
        return
    size, dtype = sum(weight.nbytes for weight in model.parameters()), str(model.dtype)
    of_rank = " on each rank" if model.tp.size > 1 else ""
    logger.info(
        "%d modules of the draft are quantized, %s, and were dequantized: it takes %.3f GiB, %s%s",
        modules, quantization, size / 2**30, dtype.removeprefix("torch."), of_rank,
    )  # fmt: skip


def check_new(model: DraftModel, tensors: Mapping[str, Tensor]) -> None:
    """Raise ConfigError unless `reload` takes these tensors, whole ones by their published names:
    some or all of the model's draft, finite, and no other vocabulary.

    Zeros are taken: who sends weights to a running server may want that.
    """
    forms = {
        name: StoredTensor(STORED_DTYPES.get(tensor.dtype, str(tensor.dtype)), tuple(tensor.shape))
        for name, tensor in tensors.items()
    }
    check_tensors(model.config, forms, is_part=True)
    for name in expected_tensors(model.config).keys() & tensors.keys():
        broken = int(tensors[name].isfinite().logical_not().sum())
        if broken:
            required = f"{broken} of {tensors[name].numel()} values are NaN or infinite"
            raise ConfigError(f"tensor {name} of the draft", required=required)
    served = _vocabulary(model)
    for name in {D2T, T2D} & tensors.keys():
        if name not in served or not served[name].equal(tensors[name].to(served[name])):
            required = "another vocabulary than the served draft's; start a server with this draft"
            raise ConfigError(f"tensor {name} of the draft", required=required)


def _vocabulary(model: DraftModel) -> dict[str, Tensor]:
    """The tensors of a checkpoint that give `token_ids`; none if it is None."""
    if (ids := model.token_ids) is None:
        return {}
    every = torch.arange(model.config.vocab_size, device=ids.device)
    return {D2T: ids - every[: len(ids)], T2D: torch.isin(every, ids)}


@torch.no_grad()
def reload(model: DraftModel, tensors: Mapping[str, Tensor]) -> None:
    """Replace weights of a frozen network in place by tensors that `check_new` has accepted, as
    recorded steps read that memory. Packed weights are packed again."""
    config, tp = model.config, model.tp
    for ours, parts in layout(config).items():
        if not any(part.name in tensors for part in parts):
            continue
        path, _, attribute = ours.rpartition(".")
        module = model.get_submodule(path)
        packed = module if isinstance(module, PackedLinear) and attribute == "weight" else None
        weight, begin = plain_weight(packed) if packed else getattr(module, attribute), 0
        for part in parts:
            whole = tensors.get(part.name, torch.empty(part.shape, device="meta"))
            shard = _shard(whole, part.split, config, tp)
            if part.name in tensors:
                weight[begin : begin + len(shard)].copy_(shard)
            begin += len(shard)
        if packed:
            packed.replace(weight)
    model.join_again()


def _random_state(
    like: DraftModel, dtype: torch.dtype, device: torch.device | str
) -> dict[str, Tensor]:
    random = torch.Generator(device).manual_seed(0)

    def filled(name: str, shape: torch.Size) -> Tensor:
        if len(shape) == 1:
            return torch.full(shape, float("norm" in name), dtype=dtype, device=device)
        return torch.empty(shape, dtype=dtype, device=device).normal_(0, 0.02, generator=random)

    return {name: filled(name, tensor.shape) for name, tensor in like.state_dict().items()}


def save_model(
    model: DraftModel, raw_config: Mapping[str, object], folder: str | Path, dtype: torch.dtype
) -> None:
    """Write `model`, which is not split over ranks, and its config.json in the published layout."""
    state, tensors = model.state_dict(), {}
    for ours, parts in layout(model.config).items():
        rows = state[ours].split([part.shape[0] for part in parts])
        for part, weight in zip(parts, rows, strict=True):
            tensors[part.name] = weight.to(dtype).contiguous()
    if model.token_ids is not None:
        tensors[D2T] = _vocabulary(model)[D2T].cpu()
    Path(folder).mkdir(parents=True, exist_ok=True)
    save_file(tensors, Path(folder) / "model.safetensors", metadata={"format": "pt"})
    (Path(folder) / "config.json").write_text(json.dumps(raw_config, indent=2) + "\n")
