"""Custom logit processors that the tests send; a server imports them from here."""

from __future__ import annotations

from typing import Any

from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor
from torch import Tensor


class Nudged(CustomLogitProcessor):
    """Adds `by` to the logits of `tokens`, both of the request's own parameters."""

    def __call__(
        self, logits: Tensor, custom_param_list: list[dict[str, Any]] | None = None
    ) -> Tensor:
        for row, params in zip(logits, custom_param_list or [], strict=True):
            row[params["tokens"]] += params["by"]
        return logits


class NoRepeat(CustomLogitProcessor):
    """Forbids every token that is already in the request's output."""

    def __call__(
        self, logits: Tensor, custom_param_list: list[dict[str, Any]] | None = None
    ) -> Tensor:
        for row, params in zip(logits, custom_param_list or [], strict=True):
            row[list(params["__req__"].output_ids)] = -float("inf")
        return logits


class Likeliest(CustomLogitProcessor):
    """Forbids every token but the likeliest."""

    def __call__(
        self, logits: Tensor, custom_param_list: list[dict[str, Any]] | None = None
    ) -> Tensor:
        return logits.masked_fill(logits < logits.amax(-1, keepdim=True), -float("inf"))
