"""Checks of the arguments of `spec_generate`, before anything runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from sglang_dflash.common.errors import ConfigError, cut
from sglang_dflash.drafting.model import DraftModel

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def find_device(field: str, name: str | int | torch.device) -> torch.device:
    """Return the device `name`. Raises ConfigError about `field` if torch does not find it."""
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    # The error for an absent device differs by backend.
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        required = f"a device that torch finds, such as 'cpu' ({cut(str(error))})"
        raise ConfigError(field, name, required) from error
    return device


def find_dtype(field: str, name: str | torch.dtype) -> torch.dtype:
    """Return the dtype `name`. Raises ConfigError about `field` if it is not one of `DTYPES`."""
    dtype = DTYPES.get(str(name).removeprefix("torch."))
    if dtype is None:
        raise ConfigError(field, name, f"one of {', '.join(DTYPES)} is required")
    return dtype


def check_pair(draft: DraftModel, target: Any) -> None:
    """Check that the two models can run together.

    Raises:
        ConfigError: one of them is not a loaded model, they differ in dtype or device, the target
            is spread over devices, or the draft was trained for another geometry.
    """
    if not isinstance(draft, DraftModel):
        loader = "sglang_dflash.DFlashDraftModel.from_pretrained"
        raise ConfigError("draft", draft, f"a model loaded with {loader} is required")
    head = getattr(target, "get_output_embeddings", lambda: None)()
    if head is None:
        loader = "transformers.AutoModelForCausalLM.from_pretrained"
        named = target if isinstance(target, str) else type(target).__name__
        raise ConfigError("target", named, f"a model with an lm_head is required: use {loader}")
    text = target.config.get_text_config()
    draft.config.check_target(
        hidden_size=text.hidden_size, vocab_size=text.vocab_size, num_layers=text.num_hidden_layers
    )
    embedding = target.get_input_embeddings().weight
    devices = sorted({str(p.device) for p in target.parameters()})
    if devices != [str(draft.device)]:
        required = f"the target has to be on one device, that of the draft ({draft.device})"
        raise ConfigError("device_map", ", ".join(devices), required)
    if embedding.dtype != draft.dtype:
        required = f"target and draft have to be of one dtype, and the draft is of {draft.dtype}"
        raise ConfigError("dtype", embedding.dtype, required)


def prompt_ids(input_ids: Any, target: Any) -> Tensor:
    """Return the prompt as int64 `[1, N]` on the target's device.

    Args:
        input_ids: an integer tensor `[1, N]`, or what a tokenizer returns with
            `return_tensors="pt"` (a mapping with the key `input_ids`, and no masked token).

    Raises:
        ConfigError: `input_ids` is anything else, has no token, or has an id outside the
            vocabulary.
    """
    if isinstance(input_ids, Mapping):
        mask = input_ids.get("attention_mask")
        if isinstance(mask, Tensor) and not bool(mask.all()):
            raise ConfigError("attention_mask", mask.tolist(), "a prompt without padding")
        input_ids = input_ids.get("input_ids")
    if not isinstance(input_ids, Tensor):
        raise ConfigError("input_ids", input_ids, 'a tensor: tokenize with return_tensors="pt"')
    integers = not (input_ids.is_floating_point() or input_ids.is_complex())
    if input_ids.dtype == torch.bool or not integers:
        raise ConfigError("input_ids", input_ids.dtype, "integers are required")
    if input_ids.ndim != 2 or input_ids.shape[0] != 1 or not input_ids.shape[1]:
        required = "one prompt at a time, [1, N], of at least one token"
        raise ConfigError("input_ids", list(input_ids.shape), required)
    rows = target.get_input_embeddings().weight
    smallest, largest = int(input_ids.min()), int(input_ids.max())
    if smallest < 0 or largest >= len(rows):
        required = f"the target's tokenizer gives ids from 0 to {len(rows) - 1}"
        raise ConfigError("input_ids", smallest if smallest < 0 else largest, required)
    return input_ids.to(device=rows.device, dtype=torch.int64)


def stop_ids(stop_token_ids: Iterable[int] | None) -> tuple[int, ...]:
    """Return stop token ids as a tuple, empty for None. Raises ConfigError unless all are int."""
    if stop_token_ids is None:
        return ()
    if not isinstance(stop_token_ids, list | tuple | set | frozenset) or not all(
        isinstance(token, int) for token in stop_token_ids
    ):
        required = "a list of token ids, such as [tokenizer.eos_token_id]"
        raise ConfigError("stop_token_ids", stop_token_ids, required)
    return tuple(stop_token_ids)


def check_new_tokens(max_new_tokens: int) -> None:
    """Raise ConfigError unless `max_new_tokens` is a positive integer."""
    if not isinstance(max_new_tokens, int) or max_new_tokens < 1:
        raise ConfigError("max_new_tokens", max_new_tokens, "a positive number of tokens")
