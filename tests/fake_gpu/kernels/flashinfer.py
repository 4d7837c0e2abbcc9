"""FlashInfer's attention: wrappers that are planned for a batch, then run for every layer."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.fake_gpu.kernels.attention import attend_and_sum, refuse
from tests.fake_gpu.launches import function, kernel


def paged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    queries: Tensor,
    starts: Tensor,
    slots: Tensor | None,
    causal: bool,
    scale: float,
    left: int,
    cap: float,
) -> None:
    """Attend for concatenated sequences, whose keys are `slots[starts[b] : starts[b + 1]]` of the
    cache, or concatenated, too, without `slots`. `lse` `[tokens, heads]` has the base 2."""
    rows_of, keys_of = (list(itertools.pairwise(x.tolist())) for x in (queries, starts))
    for (a, b), (first, last) in zip(rows_of, keys_of, strict=True):
        at = slice(first, last) if slots is None else slots[first:last].long()
        keys, values = (x.reshape(-1, *x.shape[-2:])[at] for x in (k, v))
        n, m = b - a, last - first
        rows, columns = torch.arange(n).unsqueeze(1) + m - n, torch.arange(m)
        allowed = columns <= rows if causal else torch.ones(n, m, dtype=torch.bool)
        if left >= 0:
            allowed = allowed & (columns >= rows - left)
        result, total = attend_and_sum(q[a:b], keys, values, allowed, scale, cap)
        out[a:b], lse[a:b] = result.to(out.dtype), total / torch.log(torch.tensor(2.0))


class Wrapper:
    """`BatchPrefillWithPagedKVCacheWrapper`, the same of ragged keys, and the one of decoding.

    A plan reads lengths on the host, unless it is a fast one, and with graphs copies its arguments
    to buffers that SGLang gave.
    """

    _backend = "fa2"
    _max_total_num_rows: int | None = None

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        backend: str = "auto",
        use_tensor_cores: bool = False,
        **buffers: Tensor,
    ) -> None:
        refuse(layout=kv_layout != "NHD", mask="custom_mask_buf" in buffers)
        given = {name.removesuffix("fer").removesuffix("_buf"): x for name, x in buffers.items()}
        self.is_cuda_graph_enabled, self.device = use_cuda_graph, float_workspace_buffer.device
        self._float_workspace_buffer = float_workspace_buffer
        self._int_workspace_buffer = self._pin_memory_int_workspace_buffer = None
        self._custom_mask_buf = None
        self._qo_indptr_buf = given.get("qo_indptr")
        self._paged_kv_indptr_buf = given.get("paged_kv_indptr")
        self._paged_kv_indices_buf = given.get("paged_kv_indices")
        self._paged_kv_last_page_len_buf = given.get("paged_kv_last_page_len")
        # What SGLang's own plan for graphs calls with lengths of the host.
        self._cached_module = SimpleNamespace(plan=lambda *args: None)

    def _take(self, **plan: Tensor) -> None:
        """Keep a plan's arguments, or copy them to the buffers of graphs."""
        for name, value in plan.items():
            buffer = getattr(self, f"_{name}_buf")
            if self.is_cuda_graph_enabled and buffer is not None:
                buffer[: len(value)].copy_(value, non_blocking=True)
            else:
                setattr(self, f"_{name}_buf", value)

    def _run(
        self, q: Tensor, kv: Any, causal: bool = False, sm_scale: float | None = None, **how: Any
    ) -> tuple[Tensor, Tensor]:
        if q.dtype not in (torch.bfloat16, torch.float16):
            raise RuntimeError(f"FlashInfer has no attention for {q.dtype}")
        k, v = kv
        refuse(scales=any(how.get(name) not in (None, 1.0) for name in ("k_scale", "v_scale")))
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.float32)
        scale = q.shape[-1] ** -0.5 if sm_scale is None else sm_scale
        window, cap = how.get("window_left", -1), how.get("logits_soft_cap") or 0.0
        lists = self._qo_indptr_buf, self._paged_kv_indptr_buf, self._paged_kv_indices_buf
        kernel(paged_attention)(q, k, v, out, lse, *lists, causal, scale, window, cap)
        return out, lse


class PagedPrefill(Wrapper):
    """`flashinfer.BatchPrefillWithPagedKVCacheWrapper`."""

    def begin_forward(
        self,
        qo_indptr: Tensor,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        heads: int,
        kv_heads: int,
        head_dim: int,
        page_size: int,
        custom_mask: Tensor | None = None,
        **_: Any,
    ) -> None:
        refuse(custom_mask=custom_mask is not None, page_size=page_size != 1)
        for read in (qo_indptr, indptr, last_page_len):
            read.to("cpu")
        self._take(qo_indptr=qo_indptr, paged_kv_indptr=indptr, paged_kv_indices=indices)

    def forward(self, q: Tensor, kv: Any, **how: Any) -> Tensor:
        return self._run(q, kv, **how)[0]

    def forward_return_lse(self, q: Tensor, kv: Any, **how: Any) -> tuple[Tensor, Tensor]:
        return self._run(q, kv, **how)


class RaggedPrefill(Wrapper):
    """`flashinfer.BatchPrefillWithRaggedKVCacheWrapper`."""

    def begin_forward(self, qo_indptr: Tensor, indptr: Tensor, *_: Any, **__: Any) -> None:
        for read in (qo_indptr, indptr):
            read.to("cpu")
        self._take(qo_indptr=qo_indptr, paged_kv_indptr=indptr)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, **how: Any) -> Tensor:
        return self._run(q, (k, v), **how)[0]

    def forward_return_lse(
        self, q: Tensor, k: Tensor, v: Tensor, **how: Any
    ) -> tuple[Tensor, Tensor]:
        return self._run(q, (k, v), **how)


class PagedDecode(Wrapper):
    """`flashinfer.BatchDecodeWithPagedKVCacheWrapper`."""

    def begin_forward(
        self, indptr: Tensor, indices: Tensor, last_page_len: Tensor, *_: Any, **how: Any
    ) -> None:
        for read in (indptr, last_page_len):
            read.to("cpu")
        fast_decode_plan(self, indptr, indices)

    def forward(self, q: Tensor, kv: Any, **how: Any) -> Tensor:
        return self._run(q, kv, **how)[0]


def fast_decode_plan(
    self: PagedDecode, indptr: Tensor, indices: Tensor, *_: Any, **__: Any
) -> None:
    """`flashinfer.fast_decode_plan`: lengths are known on the host."""
    self._take(paged_kv_indptr=indptr, paged_kv_indices=indices)
    self._qo_indptr_buf = torch.arange(len(indptr), device=indptr.device, dtype=torch.int32)


@function
def merge_state(a: Tensor, lse_a: Tensor, b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """`flashinfer.cascade.merge_state`: attention over the keys of both."""
    total = torch.logaddexp2(lse_a, lse_b)
    weights = (torch.exp2(x - total).nan_to_num(0.0).unsqueeze(-1) for x in (lse_a, lse_b))
    merged = sum(w * x.float() for w, x in zip(weights, (a, b), strict=True))
    return merged.to(a.dtype), total


CLASSES: dict[str, Any] = {
    "BatchPrefillWithPagedKVCacheWrapper": PagedPrefill,
    "BatchPrefillWithRaggedKVCacheWrapper": RaggedPrefill,
    "BatchDecodeWithPagedKVCacheWrapper": PagedDecode,
    "fast_decode_plan": fast_decode_plan,
}
