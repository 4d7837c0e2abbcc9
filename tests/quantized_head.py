"""An lm_head as SGLang's quantization methods leave it, for a CPU: none of SGLang's own runs there.

Each method has a weight in its own layout and an `apply` in place of a product, which is all that
SGLang's `LogitsProcessor` and our drafter know of one.
"""

from __future__ import annotations

from copy import copy
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from sglang_dflash.drafting.packed import packed_of

# What no logit reaches: a drafter that reads the padding drafts nothing else.
PADDING = 1e4
GROUP = 16


class Fp8Rows:
    """float8_e4m3fn, with a scale per row."""

    def quantize(self, head: nn.Module, weight: Tensor) -> None:
        scale = weight.abs().amax(1, keepdim=True) / torch.finfo(torch.float8_e4m3fn).max
        quantized = (weight / scale).to(torch.float8_e4m3fn)
        head.weight = nn.Parameter(quantized, requires_grad=False)
        head.weight_scale = scale

    def dense(self, head: Any) -> Tensor:
        return head.weight.float() * head.weight_scale

    def apply(self, head: Any, hidden: Tensor, bias: Tensor | None = None) -> Tensor:
        assert bias is None
        return (hidden.float() @ self.dense(head).T).to(hidden.dtype)


class Int8Rows(Fp8Rows):
    """int8, with a scale per row, as W8A8 has."""

    def quantize(self, head: nn.Module, weight: Tensor) -> None:
        scale = weight.abs().amax(1, keepdim=True) / 127
        head.weight = nn.Parameter((weight / scale).round().to(torch.int8), requires_grad=False)
        head.weight_scale = scale


class Packed4Bits(Fp8Rows):
    """Two numbers per uint8 with a scale per `GROUP` of them, as NVFP4 has."""

    def quantize(self, head: nn.Module, weight: Tensor) -> None:
        groups = weight.unflatten(1, (-1, GROUP))
        head.weight_scale = groups.abs().amax(2, keepdim=True) / 7
        codes = (groups / head.weight_scale).round().clamp(-8, 7).to(torch.int8).flatten(1) + 8
        low, high = codes[:, ::2].to(torch.uint8), codes[:, 1::2].to(torch.uint8)
        head.weight = nn.Parameter(low | high << 4, requires_grad=False)

    def dense(self, head: Any) -> Tensor:
        codes = torch.stack((head.weight & 15, head.weight >> 4), 2).flatten(1).float() - 8
        return (codes.unflatten(1, (-1, GROUP)) * head.weight_scale).flatten(1)


class Gguf(Packed4Bits):
    """The same under another name: a GGUF head has no `weight`."""

    def quantize(self, head: nn.Module, weight: Tensor) -> None:
        super().quantize(head, weight)
        head.qweight = head.weight
        del head.weight

    def dense(self, head: Any) -> Tensor:
        return super().dense(SimpleNamespace(weight=head.qweight, weight_scale=head.weight_scale))


METHODS = {method.__name__: method for method in (Fp8Rows, Int8Rows, Packed4Bits, Gguf)}


def quantized(head: Any, method: Fp8Rows) -> nn.Module:
    """A dense lm_head, which may be the embedding, too, with that method in place of its own."""
    packed = packed_of(head)
    weight = head.weight.data if packed is None else packed.unpacked()
    made = copy(head)
    made._parameters, made.quant_method = {}, method
    made.__dict__.pop("packed_weight", None)
    method.quantize(made, weight.float())
    return made


class Head(nn.Module):
    """A rank's dense lm_head of SGLang's kind, with rows of padding.

    Args:
        weight: `[V / ranks, E]`.
        first_id: of its rows.
    """

    def __init__(self, weight: Tensor, first_id: int = 0, padding: int = 8) -> None:
        super().__init__()
        rows = torch.cat((weight, torch.full_like(weight[:padding], PADDING)))
        self.weight = nn.Parameter(rows, requires_grad=False)
        self.shard_indices = SimpleNamespace(
            num_org_elements=len(weight), org_vocab_start_index=first_id
        )


class Model(nn.Module):
    """A target: an embedding of the tests' vocabulary and width, and an lm_head."""

    def __init__(self, lm_head: nn.Module) -> None:
        super().__init__()
        self.lm_head = lm_head
        self.embedding = nn.Embedding(64, 32).requires_grad_(False)

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding
