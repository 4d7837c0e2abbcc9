"""HTTP 400 for requests that would end the server, or be answered with HTTP 500.

SGLang checks a request in the process that tokenizes it, but not every value that its scheduler
cannot handle, and an exception in the scheduler ends the server. `check_shape` runs before SGLang
splits a batch into requests, `check_and_create` on every tokenized request before it is sent to the
scheduler. Both raise ValueError, which SGLang's HTTP handlers answer with status 400 and
`Engine.generate` passes on. docs/upstream.md describes what happens without them.
"""

from __future__ import annotations

import functools
import math
import re
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

from sglang_dflash.checkpoint.fields import is_int
from sglang_dflash.common.errors import shown

INT32_MAX, FLOAT32_MAX = int(np.iinfo(np.int32).max), float(np.finfo(np.float32).max)
# Far above any logit of a model: the largest float16.
LARGEST_LOGIT = float(np.finfo(np.float16).max)
# SGLang makes all `n` requests at once, in the process that answers HTTP.
MAX_CHOICES = 4096
# It also tokenizes and compiles stops there, one after the other.
MAX_STOPS = 128
# Fields of a batch that hold one value for all, or a list with one value per request.
ONE_EACH = (
    "sampling_params",
    "positional_embed_overrides",
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
# Fields that hold positions in the prompt.
POSITIONS = ("token_indices_to_pool", "multi_item_delimiter_indices")
# Fields that hold a list in a single request, and one value per request in a batch.
ONE_EACH_OF_A_BATCH = ("video_data", "audio_data", "modalities", *POSITIONS)
# Fields that SGLang indexes by request, but does not repeat for each choice of `n` or for a batch.
UNREPEATED = (*POSITIONS, "lora_id")
# Fields of a tokenized request that are large, that were checked before, or that SGLang converts
# when it sends them.
NOT_ENCODED = ("input_text", "input_ids", "input_embeds", "mm_inputs", "time_stats", "encoder_urls")


def check_shape(manager: Any, obj: Any, request: Any = None) -> None:
    """Before `TokenizerManager.generate_request`: check fields that SGLang indexes unchecked.

    Raises:
        ValueError: a list does not match the number of requests, or a field has another form.
    """
    del manager, request
    if not isinstance(obj, io_struct.GenerateReqInput):
        return
    try:
        _check_fields(obj)
    except ValueError:
        # SGLang's clean-up after a streamed request reads this attribute, which it sets later.
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
        ValueError: the scheduler cannot handle a value. Names field, value and bound.
    """
    vocab_size = manager.model_config.vocab_size
    # Placeholders of images may be outside the vocabulary; the processor has replaced others.
    if manager.mm_processor is None or not obj.contains_mm_input():
        _check_tokens(obj, input_ids, vocab_size)
    if isinstance(obj, io_struct.GenerateReqInput):
        _check_logprobs(obj, vocab_size)
        for name in POSITIONS:
            _check_positions(name, getattr(obj, name), len(input_ids or obj.input_embeds or ()))
        _check_sampling(obj.sampling_params)
        _check_scores(obj)
    tokenized = original(manager, obj, input_text, input_ids, *others, **named)
    if isinstance(tokenized, io_struct.TokenizedGenerateReqInput):
        # Here are SGLang's defaults, and --preferred-sampling-params, too.
        _check_logits(tokenized.sampling_params)
        _drop_unknown_stops(tokenized.sampling_params, vocab_size)
        _check_encoding(tokenized)
    return tokenized


def _require(holds: bool, field: str, value: Any, required: str) -> None:
    if not holds:
        raise ValueError(f"{field}: {shown(value)}; {required}")


# -- a request as it was given ---------------------------------------------------------------------


def _check_fields(obj: Any) -> None:
    size, choices, nested = _batch_size(obj), _choices(obj.sampling_params), obj.token_ids_logprob
    # SGLang makes a batch of one request with several choices.
    listed = 1 if size is None and choices > 1 else size
    _require(
        listed is not None or not isinstance(obj.rid, list),
        "rid", obj.rid, "one request takes one id, a string",
    )  # fmt: skip
    names = [*ONE_EACH, *(ONE_EACH_OF_A_BATCH if size is not None else ())]
    if isinstance(nested, list) and nested and isinstance(nested[0], list):
        names.append("token_ids_logprob")
    for name in names:
        # SGLang fills in modalities that are empty.
        if name != "modalities" or obj.modalities:
            _check_one_each(name, getattr(obj, name), listed)
    for name in UNREPEATED:
        value = getattr(obj, name)
        required = f"not with sampling_params.n, {choices}, above 1"
        _require(value is None or choices == 1, name, value, required)
        fits = value is None or size is None or isinstance(value, list)
        _require(fits, name, value, f"a list of one value for each of {size}")
    overrides = obj.positional_embed_overrides
    for override in overrides if isinstance(overrides, list) else [overrides]:
        _require(
            override is None or isinstance(override, PositionalEmbeds),
            "positional_embed_overrides", overrides,
            "a PositionalEmbeds of sglang.srt.managers.embed_types, which HTTP cannot send",
        )  # fmt: skip
    session, session_fields = obj.session_params, io_struct.SessionParams.__struct_fields__
    if session is not None:
        required = f"an object with any of {session_fields}"
        _require(isinstance(session, dict), "session_params", session, required)
        _check_names("session_params", session, session_fields)


def _choices(sampling: Any) -> int:
    """Return the most choices, `n`, that one request asks for."""
    choices = 1
    for params in (
        sampling if isinstance(sampling, list) else [{} if sampling is None else sampling]
    ):
        _require(isinstance(params, dict), "sampling_params", params, "an object of named values")
        n = params.get("n", 1)
        fits = is_int(n) and 1 <= n <= MAX_CHOICES
        _require(fits, "sampling_params.n", n, f"an integer from 1 to {MAX_CHOICES}")
        choices = max(choices, n)
    return choices


def _batch_size(obj: Any) -> int | None:
    """Return the number of requests of a batch; None for a single request."""
    text, ids, embeds = obj.text, obj.input_ids, obj.input_embeds
    if text is not None:
        texts = text if isinstance(text, list) else [text]
        are_strings = all(isinstance(string, str) for string in texts)
        _require(are_strings, "text", text, "a string, or a list of strings")
        return len(texts) if isinstance(text, list) else None
    if ids is not None:
        return None if len(ids) == 0 or isinstance(ids[0], int) else len(ids)
    if embeds is None:
        return None
    has_one = bool(embeds and embeds[0])
    _require(has_one, "input_embeds", embeds, "an embedding for at least 1 token")
    return None if isinstance(embeds[0][0], float) else len(embeds)


def _check_one_each(name: str, value: Any, size: int | None) -> None:
    if isinstance(value, list):
        _require(size is not None, name, value, "one request takes one value, no list")
        _require(len(value) == size, name, value, f"a list of {len(value)} for a batch of {size}")


def _check_names(parameter: str, names: Iterable[str], allowed: tuple[str, ...]) -> None:
    for name in names:
        if name not in allowed:
            raise ValueError(f"{parameter}.{name}: unknown; it takes {', '.join(allowed)}")


# -- a single request, tokenized -------------------------------------------------------------------


def _check_tokens(obj: Any, input_ids: Any, vocab_size: int) -> None:
    """Raise ValueError unless there are tokens, all of them in the vocabulary."""
    if input_ids is None:
        return
    session = getattr(obj, "session_params", None)
    has_history = isinstance(session, dict) and bool(session.get("id"))
    field, prompt = ("input_ids", input_ids) if obj.text is None else ("text", obj.text)
    has_prompt = len(input_ids) > 0 or has_history or obj.input_embeds is not None
    _require(has_prompt, f"{field} (prompt)", prompt, "no tokens; a prompt needs at least 1")
    required = f"token ids are integers from 0 to {vocab_size - 1}"
    try:
        tokens = array("q", input_ids)
    except (TypeError, OverflowError) as error:
        raise ValueError(f"input_ids (prompt): {error}; {required}") from error
    values = np.frombuffer(tokens, dtype=np.int64)
    outside = np.flatnonzero((values < 0) | (values >= vocab_size))
    if len(outside):
        place = int(outside[0])
        raise ValueError(f"input_ids (prompt): token {place} is {tokens[place]}; {required}")


def _check_logprobs(obj: Any, vocab_size: int) -> None:
    top, start = obj.top_logprobs_num, obj.logprob_start_len
    _require(
        is_int(top) and 0 <= top <= vocab_size,
        "top_logprobs_num (logprobs, top_logprobs)", top,
        f"an integer from 0 to {vocab_size}, the vocabulary's size",
    )  # fmt: skip
    _require(
        is_int(start) and (start >= -1 or not obj.return_logprob),
        "logprob_start_len", start,
        "an integer from 0 to the prompt's length, or -1 for the output only",
    )  # fmt: skip


def _check_positions(name: str, positions: Any, tokens: int) -> None:
    """Raise ValueError unless `positions` are in a prompt of `tokens` tokens."""
    are_inside = positions is None or (
        isinstance(positions, list)
        and bool(positions)
        and all(is_int(position) and 0 <= position < tokens for position in positions)
    )
    required = f"a list of positions in the prompt, 0 to {tokens - 1}"
    _require(are_inside, name, positions, required)


def _check_scores(obj: Any) -> None:
    """Raise ValueError if a request for scores at chosen positions asks for output tokens, or for
    log-probabilities of a part of the prompt."""
    if obj.token_indices_to_pool is None:
        return
    required = "0 is required with token_indices_to_pool"
    tokens = obj.sampling_params.get("max_new_tokens")
    _require(tokens == 0, "max_new_tokens", tokens, required)
    start = obj.logprob_start_len
    _require(not obj.return_logprob or start == 0, "logprob_start_len", start, required)


def _check_sampling(params: Mapping[str, Any]) -> None:
    """Raise ValueError for a value that SGLang does not check, or whose check raises another
    error."""
    _check_names("sampling_params", params, SamplingParams.__struct_fields__)
    values = {name: value for name, value in params.items() if value is not None}
    kinds = _sampling_types()
    for name, value in values.items():
        if name not in ("stop_token_ids", "watermark"):
            _check_type(f"sampling_params.{name}", value, kinds[name])
    for token in values.get("stop_token_ids") or ():
        if token is not None:
            _check_type("sampling_params.stop_token_ids", token, int)
    top_k = values.get("top_k", 1)
    required = f"an integer from 1 to {INT32_MAX}, or -1 for all"
    _require(top_k <= INT32_MAX, "sampling_params.top_k", top_k, required)
    floats = {name: values.get(name, 1) for name in ("temperature", "repetition_penalty")}
    biases = values.get("logit_bias", {}).items()
    for name, value in {**floats, **{f"logit_bias[{k}]": v for k, v in biases}}.items():
        fits = math.isfinite(value) and abs(value) <= FLOAT32_MAX
        required = f"a finite number, at most {FLOAT32_MAX:.3g}"
        _require(fits, f"sampling_params.{name}", value, required)
    for name in ("stop", "stop_regex"):
        stops = values.get(name, [])
        few = isinstance(stops, str) or len(stops) <= MAX_STOPS
        _require(few, f"sampling_params.{name}", stops, f"at most {MAX_STOPS} of them")
    patterns = values.get("stop_regex", [])
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        try:
            re.compile(pattern)
        except (re.error, RecursionError, OverflowError) as error:
            required = f"no regular expression: {error}"
            _require(False, "sampling_params.stop_regex", pattern, required)


def _check_logits(params: Any) -> None:
    """Raise ValueError if penalty, bias and temperature could make a logit infinite: no probability
    is a number then, and token 0 is the answer.

    Args:
        params: as SGLang has checked them: no divisor is 0.
    """
    temperature, penalty = params.temperature, params.repetition_penalty
    largest = FLOAT32_MAX * temperature
    required = f"from {LARGEST_LOGIT / largest:.3g} to 2 at temperature {temperature:g}"
    scaled = LARGEST_LOGIT / penalty
    _require(scaled <= largest, "sampling_params.repetition_penalty", penalty, required)
    for token, bias in (params.logit_bias or {}).items():
        required = f"at most {largest:.3g} at temperature {temperature:g}"
        _require(bias + scaled <= largest, f"sampling_params.logit_bias[{token}]", bias, required)


def _drop_unknown_stops(params: Any, vocab_size: int) -> None:
    """Leave out stop tokens outside the vocabulary. They end no answer, and if any request of the
    batch has `min_new_tokens`, SGLang writes at their places in a row of the vocabulary."""
    stops = params.stop_token_ids
    params.stop_token_ids = stops and ({t for t in stops if 0 <= t < vocab_size} or None)


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
        if field is None:
            raise ValueError(str(error)) from error
        _require(False, field[1], getattr(tokenized, field[1]), str(error))


@functools.cache
def _sampling_types() -> dict[str, Any]:
    """Return the type of every sampling parameter, by name."""
    return {field.name: field.type for field in msgspec.structs.fields(SamplingParams)}


@functools.cache
def _decoder(field_type: Any) -> Any:
    return msgspec.msgpack.Decoder(field_type, dec_hook=dec_hook, ext_hook=ext_hook)


def _check_type(name: str, value: Any, field_type: Any) -> None:
    """Raise ValueError unless the scheduler can decode the value as `field_type`."""
    try:
        _decoder(field_type).decode(msgspec.msgpack.encode(value, enc_hook=enc_hook))
    except (msgspec.ValidationError, TypeError, OverflowError) as error:
        _require(False, name, value, str(error))
