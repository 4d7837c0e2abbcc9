"""Arguments of operations, and what an operation gives during a capture."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes


def tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from tensors_in(each)
    elif isinstance(value, dict):
        yield from tensors_in(tuple(value.values()))


def mapped(change: Callable[[Any], Any], value: Any) -> Any:
    """`change` of everything in lists, tuples and dicts."""
    if type(value) in (list, tuple):
        return type(value)([mapped(change, each) for each in value])
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(mapped(change, each) for each in value))
    if type(value) is dict:
        return {name: mapped(change, each) for name, each in value.items()}
    return change(value)


def finished(func: Any) -> Callable[..., Any]:
    """A collective operation, waited for."""

    def run(*args: Any, **kwargs: Any) -> Any:
        result = func(*args, **kwargs)
        for value in result if isinstance(result, tuple) else (result,):
            if isinstance(value, torch.ScriptObject):
                torch._C._distributed_c10d.Work.unbox(value).wait()
        return result

    return run


def unfilled(func: Any, args: Any, kwargs: Any) -> Any:
    """The result of an operation during a capture, which runs nothing: an argument, or new
    memory."""
    schema = func._schema
    if all(r.alias_info is not None for r in schema.returns):
        written = {
            name: (i, argument.name)
            for i, argument in enumerate(schema.arguments)
            if argument.alias_info is not None
            for name in argument.alias_info.before_set
        }
        places = [written[next(iter(r.alias_info.before_set))] for r in schema.returns]
        results = tuple(kwargs[name] if name in kwargs else args[i] for i, name in places)
        return results[0] if len(results) == 1 else results or None

    def meta(x: Any) -> Any:
        if isinstance(x, Tensor):
            return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
        return torch.device("meta") if isinstance(x, torch.device) else x

    def new(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        if not x.numel():
            return torch.zeros(x.shape, dtype=x.dtype).as_strided(x.shape, x.stride())
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype).zero_()

    with _disable_current_modes():
        return mapped(new, func(*mapped(meta, args), **mapped(meta, kwargs)))
