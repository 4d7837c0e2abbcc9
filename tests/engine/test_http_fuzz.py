"""Requests drawn from the server's own OpenAPI schema: no crash, no 5xx, no hang, and the answers
to other requests stay what they were.

Each has a few fields only: with all of them at once, SGLang refuses the first and never looks at
the rest. Seeded: a run draws the same requests as the one before. Drawn with hypothesis alone:
schemathesis needs a second and more for one request of these schemas (72 and 76 fields), most of it
properties with random names.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import requests
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from hypothesis.strategies import DataObject, SearchStrategy

from sglang_dflash.tools.bench.server import Server
from tests.conftest import FUZZ
from tests.engine import client, workload
from tests.engine.servers import DFLASH, FILES, HYBRID_PAIR_DFLASH, PLAIN, ServerConfig

# Endpoint, the fields of which one makes a prompt, and the prompt if none is drawn.
PROMPTS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "/generate": (("text", "input_ids", "input_embeds"), {"text": "x = "}),
    "/v1/completions": (("prompt",), {"prompt": "x = "}),
    "/v1/chat/completions": (("messages",), {"messages": [{"role": "user", "content": "x = "}]}),
}
REQUESTS = 60
MOST_FIELDS, LONGEST, MOST_ANSWERS = 4, 8, 3
# Files and addresses to be read by the server.
MEDIA = ("image_data", "video_data", "audio_data")
GRAMMARS = ("regex", "ebnf", "json_schema", "structural_tag", "response_format")
TOKEN_LIMITS = ("max_new_tokens", "max_tokens", "max_completion_tokens")

# Values at which something begins or ends are more likely than by chance.
INTEGERS = st.sampled_from([-(2**63), -2, -1, 0, 1, 2, 7, 1023, 1024, 2**31 - 1, 2**31, 2**64])
NUMBERS = st.sampled_from([-1e300, -2.5, -1.0, 0.0, 1e-300, 0.1, 0.5, 1.0, 2.0, 1e300])
STRINGS = st.one_of(
    st.sampled_from(["", "x", "(", "a|b", "{}", '{"type": "object"}', 'root ::= "a"', "\x00"]),
    st.text(max_size=6),
)
ANYTHING = st.recursive(
    st.one_of(st.none(), st.booleans(), INTEGERS, NUMBERS, STRINGS),
    lambda inner: st.one_of(
        st.lists(inner, max_size=2), st.dictionaries(STRINGS, inner, max_size=2)
    ),
    max_leaves=4,
)
# The schema says of `sampling_params` only that it is an object.
SAMPLING: dict[str, SearchStrategy[Any]] = {
    "max_new_tokens": INTEGERS,
    "min_new_tokens": INTEGERS,
    "stop": st.one_of(STRINGS, st.lists(STRINGS, max_size=2)),
    "stop_token_ids": st.lists(INTEGERS, max_size=2),
    "stop_regex": st.one_of(STRINGS, st.lists(STRINGS, max_size=2)),
    "temperature": NUMBERS,
    "top_p": NUMBERS,
    "top_k": INTEGERS,
    "min_p": NUMBERS,
    "frequency_penalty": NUMBERS,
    "presence_penalty": NUMBERS,
    "repetition_penalty": NUMBERS,
    "ignore_eos": st.booleans(),
    "skip_special_tokens": st.booleans(),
    "spaces_between_special_tokens": st.booleans(),
    "no_stop_trim": st.booleans(),
    "regex": STRINGS,
    "json_schema": STRINGS,
    "ebnf": STRINGS,
    "structural_tag": STRINGS,
    "n": INTEGERS,
    "beam_width": INTEGERS,
    "logit_bias": st.dictionaries(st.sampled_from(["0", "1023", "1024", "x"]), NUMBERS, max_size=2),
    "sampling_seed": INTEGERS,
    "custom_params": ANYTHING,
    "stream_interval": INTEGERS,
}


def values(schema: dict[str, Any], document: dict[str, Any], depth: int = 0) -> SearchStrategy[Any]:
    """Values that a JSON schema allows; of a field now and then one that it does not allow."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        schema = document["components"]["schemas"][name]
    if depth > 4:
        return st.none()
    if "const" in schema:
        return st.just(schema["const"])
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    for several in ("anyOf", "oneOf", "allOf"):
        if several in schema:
            return st.one_of([values(one, document, depth + 1) for one in schema[several]])
    kinds: dict[str, SearchStrategy[Any]] = {
        "null": st.none(),
        "boolean": st.booleans(),
        "integer": INTEGERS,
        "number": NUMBERS,
        "string": STRINGS,
    }
    kind = schema.get("type")
    if kind in kinds:
        return kinds[kind]
    if kind == "array":
        return st.lists(values(schema.get("items") or {}, document, depth + 1), max_size=3)
    if kind == "object" and "properties" in schema:
        fields, required = schema["properties"], schema.get("required", [])
        drawn = {name: values(one, document, depth + 1) for name, one in fields.items()}
        return st.fixed_dictionaries(
            {name: drawn[name] for name in required},
            optional={name: one for name, one in drawn.items() if name not in required},
        )
    return ANYTHING


class Drawn:
    """Requests to one endpoint."""

    def __init__(self, server: Server, path: str) -> None:
        document = requests.get(f"{server.url}/openapi.json", timeout=60).json()
        body = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
        name = body["schema"]["$ref"].rpartition("/")[2]
        fields = document["components"]["schemas"][name]["properties"]
        self.prompts, self.prompt = PROMPTS[path]
        self.fields = {name: values(schema, document) for name, schema in fields.items()}
        self.names = [name for name in self.fields if name not in (*self.prompts, *MEDIA)]
        if "sampling_params" in self.fields:
            self.names.remove("sampling_params")

    def request(self, data: DataObject) -> dict[str, Any]:
        """A few fields, of the right type nine times in ten, and as few tokens to generate."""
        body = {name: self._value(name, data) for name in self._some(self.names, data)}
        if data.draw(st.booleans()):
            prompt = data.draw(st.sampled_from(self.prompts))
            body[prompt] = self._value(prompt, data)
        else:
            body.update(self.prompt)
        if "sampling_params" not in self.fields:
            return without_known_failures(limited(body, "max_tokens"))
        some = self._some(list(SAMPLING), data)
        sampling = {name: data.draw(SAMPLING[name], label=name) for name in some}
        sampling = without_known_failures(limited(sampling, "max_new_tokens"))
        return {**body, "sampling_params": sampling}

    @staticmethod
    def _some(names: list[str], data: DataObject) -> list[str]:
        return data.draw(st.lists(st.sampled_from(names), max_size=MOST_FIELDS, unique=True))

    def _value(self, name: str, data: DataObject) -> Any:
        wrong = data.draw(st.integers(0, 9)) == 0
        return data.draw(ANYTHING if wrong else self.fields[name], label=name)


def limited(params: dict[str, Any], default: str) -> dict[str, Any]:
    """Limit tokens and answers to generate: more would take time and test no more."""
    params.setdefault(default, None)
    for name in TOKEN_LIMITS:
        if name in params and not (isinstance(params[name], int) and params[name] <= LONGEST):
            params[name] = LONGEST
    for name in ("n", "best_of"):
        if isinstance(params.get(name), int):
            params[name] = min(params[name], MOST_ANSWERS)
    return params


def without_known_failures(params: dict[str, Any]) -> dict[str, Any]:
    """Remove what SGLang answers with HTTP 500 and the guard leaves: docs/upstream.md."""
    if any(params.get(name) for name in GRAMMARS):
        params.pop("min_new_tokens", None)
        params.pop("min_tokens", None)
    return params


def problem(server: Server, path: str, body: Any) -> str | None:
    """Return the answer's fault, or None: a 5xx, no answer, or a stream that reports a 5xx."""
    try:
        answer = requests.post(f"{server.url}{path}", json=body, timeout=30)
    except requests.RequestException as error:
        return f"{type(error).__name__}: {error}"
    failed = answer.status_code >= 500
    for line in answer.text.splitlines():
        if line.startswith("data: {"):
            error = json.loads(line[6:]).get("error")
            failed |= isinstance(error, dict) and int(error.get("code") or 0) >= 500
    if failed and "input_embeds" in body and "step that served this request" in answer.text:
        # Of a wrong width, or of another dtype than bfloat16: it costs the request only.
        return None
    return f"{answer.status_code} {answer.text[:300]}" if failed else None


# Flags that change which code a request reaches, for each pair.
REACHING: dict[str, dict[str, Any]] = {
    "deterministic": {"enable_deterministic_inference": True},
    "no-radix-cache": {"disable_radix_cache": True},
    "llguidance": {"grammar_backend": "llguidance"},
    "no-grammar": {"grammar_backend": "none"},
    "pytorch-sampling": {"sampling_backend": "pytorch"},
    "no-tokenizer": {"skip_tokenizer_init": True},
    "lora": {"enable_lora": True, "lora_paths": f"adapter={FILES}/adapter"},
    "streaming-sessions": {"enable_streaming_session": True},
    "priorities": {"enable_priority_scheduling": True},
    "processors": {"enable_custom_logit_processor": True},
    "chunks-of-16": {"chunked_prefill_size": 16},
    "hidden-states": {"enable_return_hidden_states": True, "disable_overlap_schedule": True},
}
# Of the dense pair only: adapters are made for it, and SGLang's sessions are not for states.
NOT_HYBRID = ("lora", "streaming-sessions", "no-radix-cache")
FUZZED = [
    DFLASH,
    *(
        pytest.param(pair.named(f"{pair}-{name}").having(**flags), marks=pytest.mark.long)
        for pair in (DFLASH, HYBRID_PAIR_DFLASH, PLAIN)
        for name, flags in REACHING.items()
        if pair in (DFLASH, PLAIN) or name not in NOT_HYBRID
    ),
]


@pytest.mark.parametrize("config", FUZZED, ids=str)
@pytest.mark.parametrize("path", PROMPTS)
def test_no_request_ends_or_breaks_the_server(
    path: str, config: ServerConfig, server: Server
) -> None:
    if "--skip-tokenizer-init" in config.flags and path != "/generate":
        pytest.skip("it takes token ids only")
    texts = workload.prompts()["demo"][:3]

    def outputs() -> list[Any]:
        prompts = [{"input_ids": [5, 6, 7]}, {"input_ids": list(range(40))}]
        if "--skip-tokenizer-init" not in config.flags:
            prompts += [{"text": text} for text in texts]
        sampling = {"sampling_params": client.GREEDY}
        return [client.post(server, "generate", p | sampling).json()["output_ids"] for p in prompts]

    before, drawn = outputs(), Drawn(server, path)
    wrong: list[tuple[Any, str]] = []

    @seed(0)
    @settings(
        max_examples=REQUESTS * FUZZ,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(data=st.data())
    def send(data: DataObject) -> None:
        body = drawn.request(data)
        found = problem(server, path, body)
        if found is not None:
            wrong.append((body, found))
        # The others would all fail.
        assert server.process.poll() is None, wrong

    send()
    assert not wrong, "\n".join(f"{json.dumps(body)[:600]}\n    {found}" for body, found in wrong)
    assert outputs() == before
    client.at_rest(server)
