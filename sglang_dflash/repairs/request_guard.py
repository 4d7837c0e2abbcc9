"""Requests that would end the server, or be answered with HTTP 500, are refused with HTTP 400.

SGLang checks a request in the process that tokenizes it, and not every value that its scheduler
cannot take. An exception in the scheduler ends the server. `check_shape` runs before SGLang takes a
request apart, `check_and_create` on every single request once it is tokenized, before it is sent to
the scheduler. Both raise ValueError, which SGLang's HTTP handlers answer with status 400 and
`Engine.generate` passes on. docs/upstream.md describes what happens without them.
"""

from __future__ import annotations

import functools
import math
import re
import reprlib
from array import array
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec
import numpy as np
from sglang.srt.managers import io_struct
from sglang.srt.managers.embed_types import PositionalEmbeds
from sglang.srt.managers.utils import MsgpackDecodeError, msgpack_decode_explained
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.utils.msgpack_utils import dec_hook, enc_hook, ext_hook

from sglang_dflash.repairs.flag import guard_off

INT32_MAX = 2**31 - 1
FLOAT32_MAX = (2 - 2**-23) * 2.0**127
# The smallest float32 with all its digits; a divisor below becomes 0 or a quotient infinite.
FLOAT32_TINY = 2.0**-126
# SGLang makes all `n` requests at once, in the process that answers HTTP.
MAX_CHOICES = 4096
# What a batch gives once, or as a list of one value per request.
ONE_EACH = (
    "return_logprob",
    "logprob_start_len",
    "top_logprobs_num",
    "return_sampling_mask",
    "sampling_logprobs_mode",
    "custom_logit_processor",
    "lora_path",
    "lora_id",
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
    "bootstrap_pair_key",
    "decode_tp_size",
)
# Places in the prompt.
POSITIONS = ("token_indices_to_pool", "multi_item_delimiter_indices")
# A request by itself takes a list of them; a batch takes one value per request.
ONE_EACH_OF_A_BATCH = ("video_data", "audio_data", "modalities", *POSITIONS)
# What SGLang indexes by request without repeating it for each choice of `n`, or for a batch.
UNREPEATED = (*POSITIONS, "lora_id")
# Fields of a tokenized request that are large, that were checked before, or that SGLang converts
# when it sends them.
NOT_ENCODED = ("input_text", "input_ids", "input_embeds", "mm_inputs", "time_stats", "encoder_urls")


def check_shape(manager: Any, obj: Any, request: Any = None) -> None:
    """Before `TokenizerManager.generate_request`: what SGLang indexes without a check.

    Raises:
        ValueError: a list does not match the number of requests, or a field has no such form.
    """
    del request
    if guard_off(manager.server_args) or not isinstance(obj, io_struct.GenerateReqInput):
        return
    try:
        _check_fields(obj)
    except ValueError:
        # SGLang's clean-up after a streamed request reads it, and sets it later than here.
        obj.is_single = not isinstance(obj.rid, list)
        raise


def check_and_create(
    original: Callable[..., Any],
    manager: Any,
    obj: Any,
    input_text: Any,
    input_ids: Any,
    *others: Any,
    **named: Any,
) -> Any:
    """Around `TokenizerManager._create_tokenized_object`, for each request of a batch.

    Raises:
        ValueError: a value that the scheduler cannot take; names field, value and bound.
    """
    if guard_off(manager.server_args):
        return original(manager, obj, input_text, input_ids, *others, **named)
    vocab_size = manager.model_config.vocab_size
    # Placeholders of images may be outside the vocabulary; the processor has replaced others.
    if manager.mm_processor is None or not obj.contains_mm_input():
        _check_tokens(obj, input_ids, vocab_size)
    if isinstance(obj, io_struct.GenerateReqInput):
        _check_logprobs(obj, vocab_size)
        for name in POSITIONS:
            _check_positions(name, getattr(obj, name), len(input_ids or obj.input_embeds or ()))
        _check_sampling(obj.sampling_params)
    tokenized = original(manager, obj, input_text, input_ids, *others, **named)
    if isinstance(tokenized, io_struct.TokenizedGenerateReqInput):
        _check_encoding(tokenized)
    return tokenized


def _check_fields(obj: Any) -> None:
    size = _batch_size(obj)
    for name in (*ONE_EACH, "sampling_params"):
        _check_one_each(name, getattr(obj, name), size)
    for name in ONE_EACH_OF_A_BATCH if size is not None else ():
        # SGLang fills in modalities that are empty.
        if name != "modalities" or obj.modalities:
            _check_one_each(name, getattr(obj, name), size)
    if size is None and isinstance(obj.rid, list):
        raise ValueError(f"rid: {_short(obj.rid)}; one request takes one id, a string")
    nested = obj.token_ids_logprob
    if isinstance(nested, list) and nested and isinstance(nested[0], list):
        _check_one_each("token_ids_logprob", nested, size)
    sampling, choices = obj.sampling_params, 1
    for params in sampling if isinstance(sampling, list) else [sampling]:
        if params is None and not isinstance(sampling, list):
            continue
        if not isinstance(params, dict):
            raise ValueError(f"sampling_params: {_short(params)}; an object of named values")
        _check_choices(params)
        choices = max(choices, params.get("n", 1))
    _check_unrepeated(obj, size, choices)
    _check_overrides(obj.positional_embed_overrides, size)
    _check_session(obj.session_params)


def _batch_size(obj: Any) -> int | None:
    """The number of requests of a batch, None for a request that is no batch."""
    if obj.text is not None:
        texts = obj.text if isinstance(obj.text, list) else [obj.text]
        for text in texts:
            if not isinstance(text, str):
                raise ValueError(f"text: {_short(obj.text)}; a string, or a list of strings")
        return len(texts) if isinstance(obj.text, list) else None
    if obj.input_ids is not None:
        ids = obj.input_ids
        return None if len(ids) == 0 or isinstance(ids[0], int) else len(ids)
    if obj.input_embeds is None:
        return None
    embeds = obj.input_embeds
    if not embeds or not embeds[0]:
        raise ValueError(f"input_embeds: {_short(embeds)}; an embedding for at least 1 token")
    return None if isinstance(embeds[0][0], float) else len(embeds)


def _check_one_each(name: str, value: Any, size: int | None) -> None:
    if not isinstance(value, list):
        return
    if size is None:
        raise ValueError(f"{name}: {_short(value)}; one request takes one value, no list")
    if len(value) != size:
        raise ValueError(f"{name}: a list of {len(value)} for a batch of {size}; one value each")


def _check_choices(params: Mapping[str, Any]) -> None:
    n = params.get("n", 1)
    if not _is_int(n) or not 1 <= n <= MAX_CHOICES:
        raise ValueError(f"sampling_params.n: {_short(n)}; an integer from 1 to {MAX_CHOICES}")


def _check_overrides(overrides: Any, size: int | None) -> None:
    each = overrides if isinstance(overrides, list) else [overrides]
    for one in each:
        if one is not None and not isinstance(one, PositionalEmbeds):
            raise ValueError(
                f"positional_embed_overrides: {_short(overrides)}; a PositionalEmbeds of "
                "sglang.srt.managers.embed_types, which HTTP cannot send"
            )
    _check_one_each("positional_embed_overrides", overrides, size)


def _check_unrepeated(obj: Any, size: int | None, choices: int) -> None:
    for name in UNREPEATED:
        value = getattr(obj, name)
        if value is None:
            continue
        if choices > 1:
            raise ValueError(
                f"{name}: {_short(value)}; not with sampling_params.n, {choices}, above 1"
            )
        if size is not None and not isinstance(value, list):
            raise ValueError(f"{name}: {_short(value)}; a list of one value for each of {size}")


def _check_session(params: Any) -> None:
    if params is None:
        return
    known = io_struct.SessionParams.__struct_fields__
    if not isinstance(params, dict):
        raise ValueError(f"session_params: {_short(params)}; an object with any of {known}")
    _check_known("session_params", params, known)


def _check_known(what: str, given: Iterable[str], known: tuple[str, ...]) -> None:
    for name in given:
        if name not in known:
            raise ValueError(f"{what}.{name}: unknown; it takes {', '.join(known)}")


def _check_tokens(obj: Any, input_ids: Any, vocab_size: int) -> None:
    """Raise ValueError unless there are tokens, all of the vocabulary."""
    if input_ids is None:
        return
    session = getattr(obj, "session_params", None)
    history = isinstance(session, dict) and bool(session.get("id"))
    if len(input_ids) == 0 and not history and obj.input_embeds is None:
        field = "input_ids (prompt)" if obj.text is None else "text (prompt)"
        given = [] if obj.text is None else obj.text
        raise ValueError(f"{field}: {_short(given)} has no tokens; a prompt needs at least 1")
    try:
        tokens = array("q", input_ids)
    except (TypeError, OverflowError) as error:
        raise ValueError(
            f"input_ids (prompt): {error}; token ids are integers from 0 to {vocab_size - 1}"
        ) from error
    values = np.frombuffer(tokens, dtype=np.int64)
    outside = np.flatnonzero((values < 0) | (values >= vocab_size))
    if len(outside):
        place = int(outside[0])
        raise ValueError(
            f"input_ids (prompt): token {place} is {tokens[place]}; token ids are integers from 0 "
            f"to {vocab_size - 1}, the vocabulary of {vocab_size}"
        )


def _check_logprobs(obj: Any, vocab_size: int) -> None:
    top = obj.top_logprobs_num
    if not _is_int(top) or not 0 <= top <= vocab_size:
        raise ValueError(
            f"top_logprobs_num (logprobs, top_logprobs): {_short(top)}; an integer from 0 to "
            f"{vocab_size}, the vocabulary's size"
        )
    start = obj.logprob_start_len
    if not _is_int(start) or (obj.return_logprob and start < -1):
        raise ValueError(
            f"logprob_start_len: {_short(start)}; an integer from 0 to the prompt's length, or -1 "
            "for the output only"
        )


def _check_positions(name: str, positions: Any, tokens: int) -> None:
    """Raise ValueError unless these are places in a prompt of so many tokens."""
    if positions is None:
        return
    are_inside = isinstance(positions, list) and all(
        _is_int(position) and 0 <= position < tokens for position in positions
    )
    if not (are_inside and positions):
        raise ValueError(
            f"{name}: {_short(positions)}; a list of positions in the prompt, 0 to {tokens - 1}"
        )


def _check_sampling(params: Mapping[str, Any]) -> None:
    """Raise ValueError for a value that SGLang does not check, or checks with another error."""
    _check_known("sampling_params", params, SamplingParams.__struct_fields__)
    kinds = _sampling_kinds()
    for name, value in params.items():
        if value is not None and name not in ("stop_token_ids", "watermark"):
            _check_kind(f"sampling_params.{name}", value, kinds[name])
    for token in params.get("stop_token_ids") or ():
        if token is not None:
            _check_kind("sampling_params.stop_token_ids", token, int)
    top_k = params.get("top_k")
    if top_k is not None and top_k > INT32_MAX:
        raise ValueError(
            f"sampling_params.top_k: {top_k}; an integer from 1 to {INT32_MAX}, or -1 for all"
        )
    for name in ("temperature", "repetition_penalty"):
        _check_float32(name, params.get(name))
    penalty = params.get("repetition_penalty")
    if penalty is not None and 0 < penalty < FLOAT32_TINY:
        raise ValueError(
            f"sampling_params.repetition_penalty: {penalty}; from {FLOAT32_TINY:.3g} to 2"
        )
    for token, bias in (params.get("logit_bias") or {}).items():
        _check_float32(f"logit_bias[{token}]", bias)
    _check_stop_regex(params.get("stop_regex"))


def _check_float32(name: str, value: float | None) -> None:
    if value is not None and not (math.isfinite(value) and abs(value) <= FLOAT32_MAX):
        raise ValueError(
            f"sampling_params.{name}: {value}; a finite number, at most {FLOAT32_MAX:.3g}"
        )


def _check_stop_regex(patterns: str | list[str] | None) -> None:
    for pattern in [patterns] if isinstance(patterns, str) else patterns or ():
        try:
            re.compile(pattern)
        except (re.error, RecursionError, OverflowError) as error:
            raise ValueError(
                f"sampling_params.stop_regex: {_short(pattern)} is no regular expression: {error}"
            ) from error


def _check_encoding(tokenized: Any) -> None:
    """Raise ValueError unless the scheduler can decode the request that SGLang will send.

    The scheduler decodes with types; a field of another type ends it.
    """
    blank = dict.fromkeys(NOT_ENCODED)
    if not isinstance(tokenized.positional_embed_overrides, (int, float, str, list, dict)):
        blank["positional_embed_overrides"] = None
    small = msgspec.structs.replace(tokenized, **blank)
    try:
        msgpack_decode_explained(io_struct.msgpack_encode(small))
    except (MsgpackDecodeError, TypeError, OverflowError) as error:
        field = re.search(r"\$\.(\w+)", str(error))
        given = f"{field[1]}: {_short(getattr(tokenized, field[1]))}; " if field else ""
        raise ValueError(f"{given}{error}") from error


@functools.cache
def _sampling_kinds() -> dict[str, Any]:
    """The type of every sampling parameter, by name."""
    return {field.name: field.type for field in msgspec.structs.fields(SamplingParams)}


@functools.cache
def _decoder(kind: Any) -> Any:
    return msgspec.msgpack.Decoder(kind, dec_hook=dec_hook, ext_hook=ext_hook)


def _check_kind(name: str, value: Any, kind: Any) -> None:
    """Raise ValueError unless the scheduler would decode the value as of that type."""
    try:
        _decoder(kind).decode(msgspec.msgpack.encode(value, enc_hook=enc_hook))
    except (msgspec.ValidationError, TypeError, OverflowError) as error:
        raise ValueError(f"{name}: {_short(value)}; {error}") from error


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _short(value: Any) -> str:
    """The value as in Python, cut to what fits a message."""
    return reprlib.repr(value)
