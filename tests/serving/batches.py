"""SGLang's own requests and batches, for tests without a server.

They are SGLang's classes: a field that a release of SGLang renames is missed by whatever reads it.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.sampling.sampling_params import SamplingParams


def request_of(
    rid: str = "r", prompt: int | Sequence[int] = 5, output: int | Sequence[int] = 0, **fields: Any
) -> Req:
    """A request.

    Args:
        prompt, output: its tokens, or the number of them.
        fields: sampling parameters, and other attributes of SGLang's `Req`.
    """
    names = set(fields) & set(SamplingParams.__struct_fields__)
    params = SamplingParams(**{name: fields.pop(name) for name in names})
    made = Req(rid, "", array("q", _tokens(prompt)), params)
    made.output_ids.extend(_tokens(output))
    for name, value in fields.items():
        if not hasattr(made, name):
            raise AttributeError(f"a request of SGLang's has no {name}")
        setattr(made, name, value)
    return made


def _tokens(given: int | Sequence[int]) -> Sequence[int]:
    return [1] * given if isinstance(given, int) else given


def batch_of(*requests: Any, **fields: Any) -> ScheduleBatch:
    """A batch on the CPU, with SGLang's defaults for what is not given."""
    return ScheduleBatch(reqs=list(requests), **{"device": "cpu", **fields})


def sampling_info(**changes: Any) -> SamplingBatchInfo:
    """Return the sampling info of two requests that differ in everything."""
    given: dict[str, Any] = {
        "temperatures": torch.tensor([[0.5], [2.0]]),
        "top_ps": torch.tensor([0.25, 0.75]),
        "top_ks": torch.tensor([3, 5]),
        "min_ps": torch.tensor([0.0, 0.125]),
        "sampling_seed": torch.tensor([11, 22]),
        "is_all_greedy": False,
        "is_any_greedy": False,
        "need_top_p_sampling": True,
        "need_top_k_sampling": True,
        "need_min_p_sampling": True,
        "vocab_size": 16,
        "device": "cpu",
    }
    return SamplingBatchInfo(**{**given, **changes})
