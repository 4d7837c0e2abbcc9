"""Tensors on the faked GPU, and what happens to an operation that has one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from tests.fake_gpu.capture import finished, mapped, tensors_in, unfilled
from tests.fake_gpu.gpu import GPU

CPU = torch.device("cpu")
# Operators by qualified name: torch code in place of compiled ones, and the Python code of
# operators that a library registers for CUDA.
COMPILED: dict[str, Callable[..., Any]] = {}
REGISTERED: dict[str, Callable[..., Any]] = {}

# Operations that take tensors of the host beside those of the GPU.
MIXED = {
    "aten::copy_",
    "aten::_to_copy",
    "aten::index",
    "aten::index_put",
    "aten::index_put_",
    "aten::_index_put_impl_",
    "aten::set_",
    "aten::is_same_size",
    "aten::_has_compatible_shallow_copy_type",
}
INDEXING = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}
# Operations whose result, or its shape, the host needs.
READ = {
    "aten::_local_scalar_dense",
    "aten::nonzero",
    "aten::equal",
    "aten::is_nonzero",
    "aten::masked_select",
    "aten::_unique2",
    "aten::unique_consecutive",
    "aten::unique_dim",
    "aten::bincount",
}


class CudaTensor(Tensor):
    """A tensor on the GPU. Its values are those of `host`, whose storage is its device memory."""

    host: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, host: Tensor, device: torch.device | None = None) -> CudaTensor:
        return Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            host.size(),
            strides=host.stride(),
            storage_offset=host.storage_offset(),
            dtype=host.dtype,
            layout=host.layout,
            device=device or GPU.device,
        )

    def __init__(self, host: Tensor, device: torch.device | None = None) -> None:
        self.host = host
        GPU.memory.add(host)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return dispatch(func, args, kwargs or {})

    def data_ptr(self) -> int:
        return self.host.data_ptr()

    def untyped_storage(self) -> Any:
        return self.host.untyped_storage()

    @property
    def data(self) -> CudaTensor:  # type: ignore[override]
        return CudaTensor(self.host, self.device)

    @data.setter
    def data(self, other: Tensor) -> None:
        if not isinstance(other, CudaTensor):
            raise NotImplementedError("`.data` of a CUDA tensor set to a tensor of the host")
        with _disable_current_modes():
            Tensor.data.__set__(self, other)  # type: ignore[attr-defined]
        self.host = other.host

    def tolist(self) -> Any:
        GPU.wait("tolist")
        return self.host.tolist()

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(f"can't convert {self.device} device type tensor to numpy")

    def pin_memory(self, *args: Any) -> Tensor:
        raise RuntimeError("cannot pin a tensor of the GPU")

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"{self.device}: {self.host!r}"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return CudaTensor, (self.host,)

    def __deepcopy__(self, memo: Any) -> CudaTensor:
        return CudaTensor(self.host.clone(), self.device)


@functools.cache
def on_gpu_too(parameter: type[Tensor]) -> type[CudaTensor]:
    """The subclass of a class of parameters whose tensors are on the GPU."""
    return type(parameter.__name__, (parameter, CudaTensor), {})


def new_parameter(cls: type[Tensor], data: Tensor, **_: Any) -> Tensor:
    """`__new__` of a class of parameters: torch's own gives a custom tensor the class of `data`."""
    if not isinstance(data, CudaTensor):
        return torch.nn.Parameter.__new__(cls, data, requires_grad=False)
    made: Any = CudaTensor.__new__(on_gpu_too(cls), data.host, data.device)
    CudaTensor.__init__(made, data.host)
    made._is_param = True
    return made


class OnGpu(TorchDispatchMode):
    """Within it, factories make tensors on the faked GPU. Every thread needs it."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return dispatch(func, args, kwargs or {})


def dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation on the host tensors inside."""
    name = func._schema.name
    tensors = list(tensors_in((args, kwargs)))
    on_gpu = [x for x in tensors if isinstance(x, CudaTensor)]
    on_host = [x for x in tensors if not isinstance(x, CudaTensor)]
    if name in COMPILED and (on_gpu or not on_host):
        return COMPILED[name](*args, **kwargs)
    if on_gpu and name in REGISTERED:
        # Python code, which may make tensors on the GPU.
        with OnGpu():
            return REGISTERED[name](*args, **kwargs)
    asked = kwargs.get("device")
    asked = None if asked is None else torch.device(asked)
    if not on_gpu and (asked is None or asked.type != "cuda"):
        return on_the_host(func, name, args, kwargs)
    if name == "aten::is_pinned":
        return False
    refuse_other_devices(func, on_gpu, on_host)
    if name.startswith("sgl_"):
        raise NotImplementedError(f"tests/fake_gpu/kernels has no torch code for {name}")
    to_host = downloads(name, args, asked, on_gpu)
    note_crossings(name, args, kwargs, to_host)
    return Call(func, args, kwargs, on_gpu, asked, to_host).run()


def on_the_host(func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operation that has nothing on the GPU; pinned memory is a storage that is noted."""
    if name in ("aten::_pin_memory", "aten::pin_memory"):
        pinned, result = True, args[0].clone()
    elif name == "aten::is_pinned":
        return args[0] in GPU.pinned
    else:
        pinned = bool(kwargs.get("pin_memory"))
        result = func(*args, **({**kwargs, "pin_memory": False} if pinned else kwargs))
    if pinned:
        GPU.pinned.add(result)
    return result


def refuse_other_devices(func: Any, on_gpu: list[CudaTensor], on_host: list[Tensor]) -> None:
    """Raises RuntimeError as torch does; scalars of the host are arguments of a launch."""
    name = func._schema.name
    devices = {x.device for x in on_gpu}
    if name not in MIXED and not name.startswith("c10d"):
        devices |= {x.device for x in on_host if x.ndim}
    elif name == "aten::copy_":
        devices = {CPU}
    if len(devices) > 1:
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, "
            f"{' and '.join(map(str, devices))}! ({name}, {[tuple(x.shape) for x in on_host]})"
        )


def downloads(name: str, args: Any, asked: torch.device | None, on_gpu: list[CudaTensor]) -> bool:
    """Say if the result is on the host."""
    if name == "aten::copy_":
        return isinstance(args[1], CudaTensor) and not isinstance(args[0], CudaTensor)
    return name == "aten::_to_copy" and bool(on_gpu) and asked is not None and asked.type == "cpu"


def note_crossings(name: str, args: Any, kwargs: dict[str, Any], to_host: bool) -> None:
    """Count waits of the host and uploads of an operation."""
    non_blocking = bool(kwargs.get("non_blocking"))
    if name == "aten::copy_":
        non_blocking |= len(args) > 2 and bool(args[2])
    reads = name in READ
    if name == "aten::repeat_interleave" and len(args) == 1:
        reads = kwargs.get("output_size") is None
    if reads or (to_host and not non_blocking):
        GPU.wait(name.removeprefix("aten::"))
    source = args[1] if name == "aten::copy_" else args[0] if name == "aten::_to_copy" else None
    if isinstance(source, Tensor) and not isinstance(source, CudaTensor) and not to_host:
        GPU.upload(source, non_blocking)
    if name in INDEXING:
        note_indices(args)


def note_indices(args: Any) -> None:
    """Masks of the GPU are counted first, and indices of the host uploaded, in either case with a
    wait. A scalar of the host that is put at a mask is filled in."""
    indices = [x for x in args[1] if isinstance(x, Tensor)]
    put = args[2] if len(args) > 2 else None
    filled = put is not None and not isinstance(put, CudaTensor) and put.numel() == 1
    for x in indices:
        if not isinstance(x, CudaTensor):
            GPU.upload(x, non_blocking=False)
        elif x.dtype == torch.bool and not (filled and len(indices) == 1):
            GPU.wait("index by mask")


class Call:
    """One operation on the GPU."""

    def __init__(
        self,
        func: Any,
        args: Any,
        kwargs: dict[str, Any],
        on_gpu: list[CudaTensor],
        asked: torch.device | None,
        to_host: bool,
    ) -> None:
        self.func, self.on_gpu, self.to_host = func, on_gpu, to_host
        self.device = on_gpu[0].device if on_gpu else GPU.device
        if asked is not None and asked.type == "cuda" and asked.index is not None:
            self.device = asked
        self.moves = asked is not None and func._schema.name == "aten::_to_copy"
        self.wrappers: dict[int, CudaTensor] = {}
        self.args = mapped(self._inner, args)
        self.kwargs = mapped(self._inner, kwargs)
        if asked is not None:
            self.kwargs["device"] = CPU
        if self.kwargs.get("pin_memory"):
            self.kwargs["pin_memory"] = False
        self.given = {id(x) for x in tensors_in((self.args, self.kwargs))}

    def run(self) -> Any:
        func = self.func
        captured = GPU.capture is not None and self.on_gpu and not self.to_host
        if captured and func.namespace == "c10d":
            # All ranks capture it: it runs now, too.
            func = finished(func)
            result = func(*self.args, **self.kwargs)
        elif captured and not self.func.is_view:
            result = unfilled(self.func, self.args, self.kwargs)
        else:
            result = self.func(*self.args, **self.kwargs)
        if self.moves and not self.to_host and id(result) in self.given:
            result = result.clone()
        if GPU.capture is not None:
            GPU.capture.record(self.func, self.args, self.kwargs, result, run=func)
        return mapped(self._outer, result)

    def _inner(self, value: Any) -> Any:
        if isinstance(value, CudaTensor):
            self.wrappers[id(value.host)] = value
            return value.host
        return CPU if isinstance(value, torch.device) and value.type == "cuda" else value

    def _outer(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        wrapper = self.wrappers.get(id(value))
        if wrapper is not None:
            if wrapper.shape != value.shape or wrapper.stride() != value.stride():
                # `unsqueeze_` and the like.
                again = CudaTensor(value, wrapper.device)
                Tensor.data.__set__(wrapper, again)  # type: ignore[attr-defined]
            return wrapper
        if self.to_host or id(value) in self.given:
            return value
        if self.func.is_view and not all(x.is_inference() for x in self.on_gpu):
            # A view of a normal tensor is one, in inference mode, too.
            with torch.inference_mode(False):
                return CudaTensor(value, self.device)
        return CudaTensor(value, self.device)
