"""Requests that SGLang cannot serve and does not refuse: path, body, what the answer must name.

`ENDS` end the server without the guard, `ENDS_PLAIN` one of plain decoding only, `FAILS` are
answered with HTTP 500, `SILENT` with HTTP 200 and an answer of no use. The pair's vocabulary has
1024 tokens.
"""

from __future__ import annotations

from typing import Any

Row = tuple[str, dict[str, Any], tuple[str, ...]]

HUGE = 1099511627776
INT32 = "2147483647"
TOKENS = ("input_ids", "0 to 1023")
EMPTY = ("no tokens", "at least 1")
TOP = ("top_logprobs_num", "0 to 1024")


def native(words: tuple[str, ...], **body: Any) -> Row:
    if not {"text", "input_ids", "input_embeds"} & set(body):
        body["text"] = "x = "
    return "generate", {"sampling_params": {"max_new_tokens": 3}, **body}, words


def sampling(words: tuple[str, ...], **params: Any) -> Row:
    return native(words, sampling_params={"max_new_tokens": 3, **params})


def logprobs(words: tuple[str, ...], **body: Any) -> Row:
    return native(words, return_logprob=True, **body)


def completion(words: tuple[str, ...], **body: Any) -> Row:
    return "v1/completions", {"model": "m", "prompt": "x = ", "max_tokens": 3, **body}, words


def chat(words: tuple[str, ...], **body: Any) -> Row:
    messages = [{"role": "user", "content": "x = "}]
    return (
        "v1/chat/completions",
        {"model": "m", "messages": messages, "max_tokens": 3, **body},
        words,
    )


ENDS: dict[str, Row] = {
    "empty text": native((*EMPTY, "text"), text=""),
    "empty texts": native((*EMPTY, "text"), text=["", ""]),
    "one empty text": native((*EMPTY, "text"), text=["a", ""]),
    "no tokens": native((*EMPTY, "input_ids"), input_ids=[[]]),
    "one request without tokens": native((*EMPTY, "input_ids"), input_ids=[[1], []]),
    "token above": native((*TOKENS, "is 1024"), input_ids=[1024]),
    "token below": native((*TOKENS, "is -1"), input_ids=[-1]),
    "token above, an image": native((*TOKENS, "5000"), input_ids=[5000], image_data="x"),
    "empty text, an image": native((*EMPTY, "text"), text="", image_data="x"),
    "token above in a batch": native((*TOKENS, "token 1 is 5000"), input_ids=[[1], [2, 5000]]),
    "top_k 2**40": sampling(("top_k", str(HUGE), INT32), top_k=HUGE),
    "top_k 2**31": sampling(("top_k", str(2**31), INT32), top_k=2**31),
    "top_k of a batch": native(
        ("top_k", str(HUGE), INT32),
        text=["a", "b"],
        sampling_params=[{"max_new_tokens": 3}, {"top_k": HUGE}],
    ),
    "top_k of choices": sampling(("top_k", str(HUGE), INT32), top_k=HUGE, n=2),
    "top logprobs": logprobs((*TOP, "100000"), top_logprobs_num=100000),
    "top logprobs, a list": logprobs(
        ("top_logprobs_num", "[1]", "one value"), top_logprobs_num=[1]
    ),
    "logprob start": logprobs(("logprob_start_len", "-5", "or -1"), logprob_start_len=-5),
    "logprob start -2": logprobs(("logprob_start_len", "-2", "or -1"), logprob_start_len=-2),
    "logprob start, a list": logprobs(
        ("logprob_start_len", "[0]", "one value"), logprob_start_len=[0]
    ),
    "embeddings that are none": native(
        ("positional_embed_overrides", "5"), positional_embed_overrides=5
    ),
    "completion, logprobs": completion((*TOP, "5000", "logprobs"), logprobs=5000),
    "completion, echo": completion((*TOP, "5000"), logprobs=5000, echo=True),
    "completion, token": completion((*TOKENS, "5000", "prompt"), prompt=[5000]),
    "completion, token below": completion((*TOKENS, "-1"), prompt=[-1]),
    "completion, no tokens": completion((*EMPTY, "input_ids (prompt)"), prompt=[[1], []]),
    "completion, top_k": completion(("top_k", str(HUGE), INT32), top_k=HUGE),
    "chat, logprobs": chat((*TOP, "5000"), logprobs=True, top_logprobs=5000),
    "chat, top_k": chat(("top_k", str(HUGE), INT32), top_k=HUGE),
    "streamed chat, top_k": chat(("top_k", str(HUGE), INT32), top_k=HUGE, stream=True),
}
# They end plain decoding. A speculative worker's prefill never counts as the last of a request.
ENDS_PLAIN: dict[str, Row] = {
    "no position": native(
        ("token_indices_to_pool", "[]", "positions in the prompt"),
        token_indices_to_pool=[],
        sampling_params={"max_new_tokens": 0},
    ),
    "a position after the prompt": native(
        ("token_indices_to_pool", "[99999]", "positions in the prompt"),
        token_indices_to_pool=[99999],
        sampling_params={"max_new_tokens": 0},
    ),
}
FAILS: dict[str, Row] = {
    "stop_regex": sampling(("stop_regex", "'('", "unterminated"), stop_regex="("),
    "stop_regex of several": sampling(("stop_regex", "'*'"), stop_regex=["a", "*"]),
    "n null": sampling(("sampling_params.n", "None", "1 to 4096"), n=None),
    "session": native(("session_params.foo", "unknown"), session_params={"foo": 1}),
    "parameters, a list": native(("sampling_params", "one value"), sampling_params=[{}]),
    "no parameters": native(("sampling_params", "one value"), sampling_params=[]),
    "too few parameters": native(
        ("sampling_params", "list of 1 for a batch of 2"), text=["a", "b"], sampling_params=[{}]
    ),
    "too few return_logprob": native(
        ("return_logprob", "list of 1 for a batch of 2"), text=["a", "b"], return_logprob=[True]
    ),
    "too few top_logprobs_num": logprobs(
        ("top_logprobs_num", "list of 1 for a batch of 2"), text=["a", "b"], top_logprobs_num=[1]
    ),
    "too few positions": native(
        ("token_indices_to_pool", "list of 1 for a batch of 2"),
        text=["a", "b"],
        token_indices_to_pool=[[0]],
    ),
    "ids, a list": native(("rid", "['a']"), rid=["a"]),
    "no embeddings": native(("input_embeds", "[]", "at least 1"), input_embeds=[]),
    "an empty embedding": native(("input_embeds", "[[]]", "at least 1"), input_embeds=[[]]),
    "completion, stop_regex": completion(("stop_regex", "'('"), stop_regex="("),
    "chat, stop_regex": chat(("stop_regex", "'('"), stop_regex="("),
}
SILENT: dict[str, Row] = {
    "n 0": sampling(("sampling_params.n", "0", "1 to 4096"), n=0),
    "n -1": sampling(("sampling_params.n", "-1", "1 to 4096"), n=-1),
    "n 100000": sampling(("sampling_params.n", "100000", "1 to 4096"), n=100000),
    "top logprobs -1": logprobs((*TOP, "-1"), top_logprobs_num=-1),
    "completion, logprobs -1": completion((*TOP, "-1"), logprobs=-1),
    "chat, logprobs -1": chat((*TOP, "-1"), logprobs=True, top_logprobs=-1),
    "temperature": sampling(("temperature", "1e+300", "3.4e+38"), temperature=1e300),
    "repetition_penalty": sampling(("repetition_penalty", "1e-300"), repetition_penalty=1e-300),
    "logit_bias": sampling(("logit_bias[5]", "1e+300", "3.4e+38"), logit_bias={"5": 1e300}),
    "logit_bias, divided": sampling(
        ("logit_bias[5]", "3e+38", "temperature 0.5"), logit_bias={"5": 3e38}, temperature=0.5
    ),
    "return_logprob, a list": native(("return_logprob", "one value"), return_logprob=[False]),
}
SAVER = ("--enable-memory-saver",)
OPERATORS: dict[str, Row] = {
    "a release of memory": ("release_memory_occupation", {}, SAVER),
    "memory that was not released": ("resume_memory_occupation", {}, SAVER),
    "a level of the log": (
        "configure_logging",
        {"log_requests": True, "log_requests_level": 9},
        ("log_requests_level", "9", "0 to 3"),
    ),
}
REFUSED = {**ENDS, **ENDS_PLAIN, **FAILS, **SILENT, **OPERATORS}
