"""What callers of `spec_generate` hand in, checked before anything runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from sglang_dflash.drafting.model import DraftModel
from sglang_dflash.facts.errors import ConfigError


def device_named(what: str, name: str | int | torch.device) -> torch.device:
    """The device of that name. Raises ConfigError, with `what` before the name, if it is absent."""
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    # The error for an absent device differs by backend.
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ConfigError(
            f"{what}: {name!r} cannot be used here ({str(error).splitlines()[0]}); 'cpu' always can"
        ) from error
    return device


def check_pair(draft: DraftModel, target: Any) -> None:
    """Whether the two models can run together.

    Raises:
        ConfigError: one of them is a name or is of another kind, they differ in dtype or device,
            the target is spread over devices, or the draft was trained for another geometry.
    """
    if not isinstance(draft, DraftModel):
        raise ConfigError(
            f"draft: {_shown(draft)} is no loaded draft; load one with "
            "sglang_dflash.DFlashDraftModel.from_pretrained"
        )
    missing = [
        name for name in ("config", "get_decoder", "get_output_embeddings", "parameters")
        if not hasattr(target, name)
    ]  # fmt: skip
    if missing:
        raise ConfigError(
            f"target: {_shown(target)} is no loaded model; load one with "
            "transformers.AutoModelForCausalLM.from_pretrained"
        )
    text = target.config.get_text_config()
    draft.config.check_target(
        hidden_size=text.hidden_size, vocab_size=text.vocab_size, num_layers=text.num_hidden_layers
    )
    own, embedding = draft.fc.weight, target.get_input_embeddings().weight
    head = target.get_output_embeddings()
    if head is None:
        raise ConfigError(
            f"target: {type(target).__name__} has no lm_head; load it with "
            "transformers.AutoModelForCausalLM.from_pretrained"
        )
    devices = sorted({str(p.device) for p in target.parameters()})
    if len(devices) > 1:
        raise ConfigError(
            f"target: its weights are on {', '.join(devices)}; one device is required "
            f"(device_map={str(own.device)!r})"
        )
    if embedding.device != own.device:
        raise ConfigError(
            f"device_map: the draft is on {own.device}, the target on {embedding.device}; "
            "load both on the same device"
        )
    if embedding.dtype != own.dtype:
        raise ConfigError(
            f"dtype: the draft is in {own.dtype}, the target in {embedding.dtype}; "
            f"load both with the same dtype (dtype={str(embedding.dtype)!r} for the draft)"
        )


def prompt_ids(input_ids: Any, target: Any) -> Tensor:
    """The prompt as int64 `[1, N]` on the target's device.

    Args:
        input_ids: an integer tensor `[1, N]`, or what a tokenizer returns with
            `return_tensors="pt"` (a mapping with the key `input_ids`, and no masked token).

    Raises:
        ConfigError: it is anything else, has no token, or holds an id outside the vocabulary.
    """
    if isinstance(input_ids, Mapping):
        mask = input_ids.get("attention_mask")
        if "input_ids" not in input_ids:
            raise ConfigError(
                f"input_ids: a mapping of {', '.join(map(str, input_ids)) or 'nothing'}; "
                "the key input_ids is required"
            )
        if isinstance(mask, Tensor) and not bool(mask.all()):
            raise ConfigError(
                f"attention_mask: {int((mask == 0).sum())} tokens are masked; "
                "one prompt without padding is required"
            )
        input_ids = input_ids["input_ids"]
    if not isinstance(input_ids, Tensor):
        raise ConfigError(
            f"input_ids: {_shown(input_ids)} is no tensor; "
            'call the tokenizer with return_tensors="pt"'
        )
    if input_ids.ndim != 2:
        raise ConfigError(
            f"input_ids: a tensor of shape {list(input_ids.shape)}; [1, N] is required"
        )
    if input_ids.shape[0] != 1:
        raise ConfigError(
            f"input_ids: {input_ids.shape[0]} rows; one prompt at a time is generated here"
        )
    if not input_ids.shape[1]:
        raise ConfigError("input_ids: the prompt is empty; at least one token is required")
    if input_ids.is_floating_point() or input_ids.is_complex() or input_ids.dtype == torch.bool:
        raise ConfigError(f"input_ids: a tensor of {input_ids.dtype}; integers are required")
    rows = target.get_input_embeddings().weight
    least, most = int(input_ids.min()), int(input_ids.max())
    if least < 0 or most >= len(rows):
        raise ConfigError(
            f"input_ids: {least if least < 0 else most} is outside the target's vocabulary "
            f"of {len(rows)} ids; is this its tokenizer?"
        )
    return input_ids.to(device=rows.device, dtype=torch.int64)


def stop_ids(stop_token_ids: Iterable[int] | None) -> tuple[int, ...]:
    """Token ids that end a text, none for None. Raises ConfigError if one is not an integer."""
    if stop_token_ids is None:
        return ()
    given = list(stop_token_ids) if isinstance(stop_token_ids, Iterable) else [stop_token_ids]
    if not isinstance(stop_token_ids, list | tuple | set | frozenset) or not all(
        isinstance(token, int) for token in given
    ):
        raise ConfigError(
            f"stop_token_ids: {stop_token_ids!r}; a list of token ids is required, such as "
            "[tokenizer.eos_token_id] of a tokenizer that has one"
        )
    return tuple(given)


def check_new_tokens(max_new_tokens: int) -> None:
    """Raise ConfigError unless `max_new_tokens` is a positive integer."""
    if not isinstance(max_new_tokens, int) or max_new_tokens < 1:
        raise ConfigError(
            f"max_new_tokens: {max_new_tokens!r}; a positive number of tokens is required"
        )


def _shown(value: object) -> str:
    """A name as it is, anything else by its type."""
    return repr(value) if isinstance(value, str) else f"a {type(value).__name__}"
