"""Claims: the faked GPU refuses, counts and computes as a GPU does. Prints those that fail."""

from __future__ import annotations

import json
import threading
import traceback
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tests.fake_gpu.gpu import GPU


def waited(run: Callable[[], Any]) -> int:
    """The number of waits of the host in it."""
    before = GPU.waits.total()
    run()
    return GPU.waits.total() - before


def refused(run: Callable[[], Any], words: str) -> None:
    try:
        run()
    except (RuntimeError, ValueError, TypeError) as error:
        assert words in str(error), error
    else:
        raise AssertionError("not refused")


def on_gpu(*values: float, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor(values, dtype=dtype, device="cuda")


@triton.jit
def double(x, n, block: tl.constexpr):
    at = tl.arange(0, block)
    tl.store(x + at, 2 * tl.load(x + at, at < n), at < n)


def tensors_say_that_they_are_on_the_gpu() -> None:
    x = on_gpu(1, 2)
    assert x.is_cuda and x.device == torch.device("cuda", 0) and (x + x).is_cuda
    assert x.cpu().tolist() == [1, 2] and not x.cpu().is_cuda
    assert torch.zeros(2).device.type == "cpu"


def two_devices_are_refused() -> None:
    x, host = on_gpu(1, 2), torch.ones(2)
    refused(lambda: x + host, "at least two devices")
    refused(lambda: torch.cat([x, host]), "at least two devices")
    refused(lambda: x + torch.ones(2, device="cuda:1"), "at least two devices")
    assert (x + torch.tensor(1.0)).tolist() == [2, 3]
    refused(lambda: x.numpy(), "can't convert")


def kernels_refuse_memory_of_the_host() -> None:
    refused(lambda: double[(1,)](torch.ones(4), 4, block=4), "cannot be accessed from Triton")
    x = on_gpu(1, 2, 3)
    double[(1,)](x, 3, block=4)
    assert x.tolist() == [2, 4, 6]


def bfloat16_is_computed_with_its_values() -> None:
    x = on_gpu(1.5, -3, 100, dtype=torch.bfloat16)
    double[(1,)](x, 3, block=4)
    assert x.tolist() == [3, -6, 200]


def reading_a_value_waits() -> None:
    index = on_gpu(0, dtype=torch.int64)
    x, mask, counts = on_gpu(1, 2), on_gpu(1, 0).bool(), on_gpu(1, 2, dtype=torch.int32)
    for read in (
        lambda: x[0].item(),
        lambda: x.tolist(),
        lambda: bool(mask[0]),
        lambda: x.cpu(),
        lambda: torch.empty(2).copy_(x),
        lambda: mask.nonzero(),
        lambda: x[mask],
        lambda: torch.equal(x, x),
        lambda: x.unique(),
        lambda: torch.repeat_interleave(counts),
        lambda: torch.cuda.synchronize(),
        lambda: torch.cuda.current_stream().synchronize(),
        lambda: torch.cuda.Event().synchronize(),
        # Uploads wait too, unless they are asked not to.
        lambda: torch.ones(2).cuda(),
        lambda: torch.tensor([1], device="cuda"),
        lambda: x[torch.tensor([0])],
        lambda: x.__setitem__(0, 7.0),
    ):
        assert waited(read) >= 1, read
    host = torch.empty(2, pin_memory=True)
    for launch in (
        lambda: host.copy_(x, non_blocking=True),
        lambda: host.to("cuda", non_blocking=True),
        lambda: x[index],
        lambda: x.masked_fill_(mask, 1.0),
        lambda: x.__setitem__(mask, 1.0),
        lambda: x.__setitem__(slice(0, 1), 7.0),
        lambda: torch.repeat_interleave(counts, output_size=3),
        lambda: torch.zeros(2, device="cuda"),
    ):
        assert waited(launch) == 0, launch


def uploads_of_pageable_memory_are_counted() -> None:
    before = GPU.uploads.total()
    torch.ones(2).pin_memory().to("cuda", non_blocking=True)
    torch.ones(2, pin_memory=True)[:1].to("cuda", non_blocking=True)
    torch.empty(0).to("cuda", non_blocking=True)
    assert GPU.uploads.total() == before
    torch.ones(2).to("cuda", non_blocking=True)
    assert GPU.uploads.total() == before + 1


def memory_is_that_of_live_storages() -> None:
    before = torch.cuda.memory_allocated()
    x = torch.zeros(1000, device="cuda")
    view = x.view(10, 100)[3]
    assert torch.cuda.memory_allocated() == before + 4000
    free, total = torch.cuda.mem_get_info()
    assert total - free == before + 4000
    del x
    assert torch.cuda.memory_allocated() == before + 4000
    del view
    assert torch.cuda.memory_allocated() == before


def a_graph_replays_on_the_memory_of_its_capture() -> None:
    x = on_gpu(1, 2, 3)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x + 1
        double[(1,)](y, 3, block=4)
        y[:1] = 7
    assert y.tolist() == [0, 0, 0]
    x.copy_(on_gpu(4, 5, 6))
    graph.replay()
    assert y.tolist() == [7, 12, 14]


def tensors_are_made_on_the_current_device() -> None:
    with torch.device("cuda"):
        assert all(x.is_cuda for x in (torch.tensor(1.0), torch.empty(1)))
    with torch.cuda.device(1):
        weight = torch.nn.Linear(1, 1).cuda().weight
        made = on_gpu(1), torch.ones(1).cuda(), torch.ones(1).to("cuda"), weight
    assert [x.device.index for x in made] == [1, 1, 1, 1]
    assert on_gpu(1).device.index == 0


def a_capture_refuses_waits() -> None:
    x = on_gpu(1, 2)

    def capture() -> None:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            x[0].item()

    refused(capture, "not permitted when stream is capturing")
    assert not torch.cuda.is_current_stream_capturing()


def a_generator_has_a_device() -> None:
    generator = torch.Generator("cuda")
    x = torch.empty(3, device="cuda")
    first, again = (x.uniform_(generator=generator.manual_seed(5)).tolist() for _ in range(2))
    assert generator.device == x.device and first == again != x.uniform_().tolist()
    assert torch.Generator().device.type == "cpu"


def threads_have_it_too() -> None:
    made: list[Tensor] = []
    thread = threading.Thread(target=lambda: made.append(torch.ones(1, device="cuda")))
    thread.start()
    thread.join()
    assert made[0].is_cuda


def marlin_multiplies_by_the_values_of_nvfp4() -> None:
    from sglang.srt.layers.quantization import marlin_utils_fp4 as sglang

    from tests.quantized_checkpoints import modelopt_nvfp4

    weight, x = torch.randn(96, 192), torch.randn(3, 192).bfloat16()
    parts, values = modelopt_nvfp4(weight, weight.abs().max())
    layer: Any = torch.nn.Module()
    layer.output_size_per_partition, layer.input_size_per_partition = weight.shape
    layer.params_dtype, layer.weight_global_scale = x.dtype, parts["weight_scale_2"].cuda()
    layer.weight, layer.weight_scale = parts["weight"].cuda(), parts["weight_scale"].cuda()
    sglang.prepare_nvfp4_layer_for_marlin(layer)
    stored = layer.weight, layer.weight_scale, layer.weight_global_scale, layer.workspace
    product = sglang.apply_fp4_marlin_linear(x.cuda(), *stored, *weight.shape).cpu()
    assert torch.allclose(product.float(), x.float() @ values.T, rtol=0.02, atol=0.05)


CLAIMS = (
    tensors_say_that_they_are_on_the_gpu,
    two_devices_are_refused,
    kernels_refuse_memory_of_the_host,
    bfloat16_is_computed_with_its_values,
    reading_a_value_waits,
    uploads_of_pageable_memory_are_counted,
    memory_is_that_of_live_storages,
    a_graph_replays_on_the_memory_of_its_capture,
    tensors_are_made_on_the_current_device,
    a_capture_refuses_waits,
    a_generator_has_a_device,
    threads_have_it_too,
    marlin_multiplies_by_the_values_of_nvfp4,
)


def main() -> None:
    """The last line is a JSON object: name -> how it failed, or null."""
    outcomes: dict[str, str | None] = {}
    for claim in CLAIMS:
        try:
            claim()
            outcomes[claim.__name__] = None
        except Exception:
            outcomes[claim.__name__] = traceback.format_exc()
    print(json.dumps(outcomes))


if __name__ == "__main__":
    main()
