"""Check of the draft weights that SGLang's own worker reads: without a message, it skips tensors
that it has no use for, and serves parameters that no tensor has filled."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from sglang.srt.model_loader.weight_utils import default_weight_loader
from torch import Tensor, nn

from sglang_dflash.checkpoint.stored import and_more, plain_name
from sglang_dflash.checkpoint.tensors import HARMLESS
from sglang_dflash.common.errors import ConfigError
from sglang_dflash.common.log import Log

logger = Log(__name__)

# Drafts borrow these of the target, and may hold copies.
_BORROWED = ("embed_tokens.weight", "lm_head.weight")
# Ends of the names of parameters that have a value without a tensor.
_OPTIONAL = (*HARMLESS, "g_idx", "zero_point", ".weight_shape")
# A parameter that joins several tensors -> what SGLang calls each of them.
_JOINED: dict[str, set[Any]] = {"qkv_proj": {"q", "k", "v"}, "gate_up_proj": {0, 1}}
# Set on a model whose weights are loaded: what comes later may be a part of them.
_LOADED = "sglang_dflash_loaded"


def load_weights(original: Any, model: nn.Module, weights: Iterable[tuple[str, Tensor]]) -> Any:
    """Around the first `load_weights` of SGLang's draft model.

    Raises:
        ConfigError: a weight is filled by no tensor. Tensors that are not read are named in a
            warning.
    """
    if getattr(model, _LOADED, False):
        return original(model, weights)
    filled: dict[str, set[Any]] = {name: set() for name, _ in model.named_parameters()}
    unread: list[str] = []

    def each() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights:
            before = _count(filled)
            yield name, tensor
            plain = plain_name(name)
            if _count(filled) == before and not plain.endswith(HARMLESS) and plain not in _BORROWED:
                unread.append(name)

    with _noted(model, filled):
        result = original(model, each())
    setattr(model, _LOADED, True)
    _judge([name for name, shards in filled.items() if not _is_whole(name, shards)], unread)
    return result


def _judge(unfilled: list[str], unread: list[str]) -> None:
    """Refuse or warn, see `load_weights`."""
    lost = [name for name in unfilled if not name.endswith(_OPTIONAL)]
    if lost:
        beside = f"; nothing reads {unread[0]}{and_more(unread)} of the draft" if unread else ""
        required = f"no tensor of the draft fills it{and_more(lost)}{beside}"
        raise ConfigError(f"{lost[0]} of SGLang's draft model", required=required)
    if unread:
        logger.warning(
            "SGLang's worker does not read %s%s of the draft: if they matter, fewer drafts are "
            "accepted", unread[0], and_more(unread),
        )  # fmt: skip


def _is_whole(name: str, shards: set[Any]) -> bool:
    """Return whether a parameter has been filled: by one tensor, or by all tensors that it
    joins."""
    module = name.split(".")[-2] if "." in name else ""
    return bool(shards) and (None in shards or _JOINED.get(module, set()) <= shards)


def _count(filled: dict[str, set[Any]]) -> int:
    return sum(map(len, filled.values()))


@contextmanager
def _noted(model: nn.Module, filled: dict[str, set[Any]]) -> Iterator[None]:
    """For a while, note for each parameter the shards that are loaded into it; None for the whole.

    SGLang asks a parameter for its loader; some of its classes have it behind a property.
    """
    changed: list[tuple[nn.Parameter, str, Any]] = []
    for name, parameter in model.named_parameters():
        place = "_weight_loader" if "_weight_loader" in vars(parameter) else "weight_loader"
        changed.append((parameter, place, vars(parameter).get(place)))
        load = vars(parameter).get(place, default_weight_loader)
        setattr(parameter, place, functools.partial(_load, load, filled[name]))
    try:
        yield
    finally:
        for parameter, place, before in changed:
            delattr(parameter, place) if before is None else setattr(parameter, place, before)


def _load(
    load: Callable[..., Any], shards: set[Any], parameter: Any, tensor: Tensor, *shard: Any
) -> Any:
    shards.add(shard[0] if shard else None)
    return load(parameter, tensor, *shard)
