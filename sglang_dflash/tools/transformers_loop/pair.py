"""A pair from disk or the hub, and prompts for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jinja2 import TemplateError

from sglang_dflash.checkpoint.draft_config import DraftConfig
from sglang_dflash.checkpoint.hub import draft_folder
from sglang_dflash.checkpoint.published import check_target_folder
from sglang_dflash.common.errors import ConfigError, cut, shown_pair
from sglang_dflash.common.log import Log
from sglang_dflash.drafting.model import DraftModel
from sglang_dflash.drafting.options import Options
from sglang_dflash.drafting.weights import load_model
from sglang_dflash.tools.transformers_loop.checks import find_device, find_dtype

logger = Log(__name__)


@dataclass(frozen=True)
class LoadedPair:
    """A draft and its target, the target's tokenizer, and the ids that end a text."""

    draft: DraftModel
    target: Any
    tokenizer: Any
    stop_token_ids: tuple[int, ...]


def load(
    target: str,
    draft: str,
    options: Options | None = None,
    dtype: str | None = None,
    device: str | None = None,
) -> LoadedPair:
    """Load a pair, each a folder or a hub name.

    Args:
        options: block size and context window, which are checked against both models.
        dtype: as torch names it; None for float32 on a CPU, bfloat16 elsewhere.
        device: as torch names it; None for the first GPU, or the CPU.

    Raises:
        ConfigError: the target or the draft cannot be loaded, the two do not fit, or an argument
            does not fit them.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    options = options or Options()
    on = find_device("device", device or ("cuda" if torch.cuda.is_available() else "cpu"))
    model_dtype = find_dtype("dtype", dtype or ("float32" if on.type == "cpu" else "bfloat16"))
    check_target_folder(target)
    folder = draft_folder(draft)
    config = DraftConfig.from_pretrained(folder)
    resolved = options.resolve(config)
    try:
        # The target's weights are loaded last, so that a draft that does not fit is refused early.
        text = AutoConfig.from_pretrained(target).get_text_config()
        config.check_target(
            hidden_size=text.hidden_size,
            vocab_size=text.vocab_size,
            num_layers=text.num_hidden_layers,
            pair=shown_pair(draft, target),
        )
        context = getattr(text, "max_position_embeddings", None)
        resolved = replace(resolved, context=context)
        resolved.check_room(kv_tokens=None)
        for warning in resolved.warnings(config, {"verify_block": "block size"}):
            logger.warning("%s", warning)
        network = load_model(folder, dtype=model_dtype, device=on)
        tokenizer = AutoTokenizer.from_pretrained(target)
        model: Any = AutoModelForCausalLM.from_pretrained(target, dtype=model_dtype).eval()
    except ConfigError:
        raise
    except (OSError, ValueError) as error:
        required = f"a causal language model that Transformers can load ({cut(str(error))})"
        raise ConfigError("target", target, required) from error
    return LoadedPair(network, model.to(on), tokenizer, _stop_token_ids(model, tokenizer))


def _stop_token_ids(target: Any, tokenizer: Any) -> tuple[int, ...]:
    """Return the stop tokens of the generation config, as `generate` does; else the tokenizer's."""
    named = target.generation_config.eos_token_id
    if named is None:
        named = tokenizer.eos_token_id
    if named is None:
        return ()
    return tuple(named) if isinstance(named, list) else (named,)


def chat_tokens(
    tokenizer: Any,
    messages: list[dict[str, Any]],
    thinking: bool | None = None,
    tools: Sequence[Mapping[str, Any]] = (),
) -> list[int]:
    """Token ids of a chat, up to the beginning of the assistant's answer.

    Args:
        tokenizer: a tokenizer of Transformers.
        messages: with the keys `role` and `content`.
        thinking: the template's `enable_thinking`; None for the template's default.
        tools: passed to the template.

    Raises:
        ConfigError: the tokenizer has no chat template, or it does not accept these messages.
    """
    if not tokenizer.chat_template:
        required = "this model has no chat template; send the prompt as plain text"
        raise ConfigError("chat", tokenizer.name_or_path, required)
    extra: dict[str, Any] = {} if thinking is None else {"enable_thinking": thinking}
    if tools:
        extra["tools"] = list(tools)
    try:
        text = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, **extra
        )
    except TemplateError as error:
        roles = " ".join(message["role"] for message in messages)
        required = f"the model's chat template does not take it ({cut(str(error))})"
        raise ConfigError("chat", roles, required) from error
    # The template has added the special tokens.
    return tokenizer(text, add_special_tokens=False)["input_ids"]
