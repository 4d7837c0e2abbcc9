"""Prefill/decode disaggregation: two servers and SGLang's router give one server's answers, with
its acceptance from the first block on.

python -m pytest tests/engine/test_disaggregation.py -m long -s
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import pytest
import requests

from sglang_dflash.tools.bench.server import Server, free_port
from sglang_dflash.tools.bench.server import together as side_by_side
from tests.engine import workload
from tests.engine.checks import cached_tokens
from tests.engine.client import GREEDY, at_rest
from tests.engine.hierarchical import SMALL
from tests.engine.nursery import ForkedServer
from tests.engine.router import BOUND, post, router
from tests.engine.servers import (
    DFLASH,
    HYBRID_PAIR,
    HYBRID_PAIR_DFLASH,
    LOOKUP,
    MIXED,
    PAIR,
    PLAIN,
    SLIDING_DRAFT,
    WINDOW,
    ServerConfig,
)
from tests.engine.session import ServerSession

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        importlib.util.find_spec("mooncake") is None,
        reason="needs mooncake-transfer-engine-non-cuda, libibverbs1 and librdmacm1",
    ),
]

CLIENTS = 4
DENSE = DFLASH.named("pd-dense")
SLIDING = DENSE.named("pd-sliding").having(**SLIDING_DRAFT)
CHATS = DENSE.named("pd-chats").having(max_running_requests=8)
CASES = {
    "dense": (DENSE, PAIR),
    "sliding": (SLIDING, PAIR),
    "pages": (
        SLIDING.named("pd-pages").having(
            page_size=16, disable_overlap_schedule=True, chunked_prefill_size=64, **WINDOW, **LOOKUP
        ),
        PAIR,
    ),
    # Two draft KV caches.
    "mixed": (DENSE.named("pd-mixed").having(page_size=4, **MIXED), PAIR),
    "hybrid": (HYBRID_PAIR_DFLASH.named("pd-hybrid"), HYBRID_PAIR),
}  # fmt: skip


@dataclass(frozen=True)
class Pair:
    """Attributes:
    bootstrap: the prefill server's port for decode servers.
    url: the router's.
    """

    prefill: Server
    decode: Server
    bootstrap: int
    url: str

    def generate(self, prompt: str | list[int], **sampling: Any) -> dict[str, Any]:
        """Generate as `Server.generate` does."""
        response = post(self.url, prompt, **sampling)
        response.raise_for_status()
        return response.json()


def roles(config: ServerConfig, bootstrap: int) -> tuple[ServerConfig, ServerConfig]:
    """The prefill and the decode server of a configuration."""
    # Seconds between two questions whether the prefill server is alive.
    env = {
        "MOONCAKE_PROTOCOL": "tcp",
        "MC_FORCE_TCP": "true",
        "SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL": "2.0",
    }
    both = config.with_env(**env).having(disaggregation_transfer_backend="mooncake")
    return (
        both.having(disaggregation_mode="prefill", disaggregation_bootstrap_port=bootstrap),
        both.having(disaggregation_mode="decode", disaggregation_decode_retraction_backup="none"),
    )


@contextmanager
def disaggregated(
    session: ServerSession, config: ServerConfig, decode: ServerConfig | None = None
) -> Iterator[Pair]:
    """A pair of servers of that configuration; the decode server of another one if given."""
    bootstrap = free_port()
    first, second = roles(config, bootstrap)[0], roles(decode or config, bootstrap)[1]
    servers = [session.own(of) for of in (first, second)]
    with side_by_side(servers), pair_router(servers[0], servers[1], bootstrap) as url:
        yield Pair(servers[0], servers[1], bootstrap, url)


def pair_router(prefill: Server, decode: Server, bootstrap: int) -> AbstractContextManager[str]:
    """The address of SGLang's router before a prefill and a decode server."""
    return router(
        "--disable-retries", "--pd-disaggregation", "--prefill", prefill.url, str(bootstrap),
        "--decode", decode.url,
    )  # fmt: skip


def answers(one: Server | Pair, prompts: list[str]) -> list[dict[str, Any]]:
    """Ask all prompts, `CLIENTS` at a time, twice: then their prefixes are cached."""
    with ThreadPoolExecutor(CLIENTS) as pool:
        return list(pool.map(lambda text: one.generate(text, **GREEDY), [*prompts, *prompts]))


def visible_bytes(
    found: list[dict[str, Any]], report: dict[str, Any], page_size: int
) -> tuple[float, float]:
    """Draft K/V of the prompts' tokens that drafts can see, and of the pages that these can touch,
    at most. (A cache ends with an entry of padding.)"""
    groups = report["draft_kv_groups"]
    of_token = report["draft_kv_bytes"] / (report["draft_kv_entries"] + 1)
    of_layer = of_token / sum(len(group["layers"]) for group in groups)
    seen, touched = 0.0, 0.0
    for group in groups:
        # Their ends, and the sinks', may lie within a page.
        partial = 2 * page_size * (1 + bool(group["sinks"])) if page_size > 1 else 0
        for n in (one["meta_info"]["prompt_tokens"] for one in found):
            tokens = min(n, (group["window"] or n) + group["sinks"])
            seen += of_layer * len(group["layers"]) * tokens
            touched += of_layer * len(group["layers"]) * (tokens + partial)
    return seen, touched


@pytest.mark.parametrize("case", CASES)
def test_outputs_and_acceptance_are_those_of_one_server(servers: ServerSession, case: str) -> None:
    config, pair = CASES[case]
    # The last ones are longer than any window.
    prompts = [*pair.prompts[:24], *(text * 8 for text in pair.prompts[:4])]
    expected = answers(servers.server(config), prompts)
    with disaggregated(servers, config, config.changed("poisoned_draft_kv")) as both:
        before = both.decode.dflash()
        found = answers(both, prompts)
        report, sent = both.decode.dflash(), both.prefill.dflash()
        at_rest(both.decode)
        at_rest(both.prefill)
    workload.assert_same_outputs(found, expected)
    lengths = workload.acceptance_length(found), workload.acceptance_length(expected)
    prompt = sum(one["meta_info"]["prompt_tokens"] for one in found)
    received = report["draft_kv_received_bytes"] - before["draft_kv_received_bytes"]
    seen, touched = visible_bytes(found, report, int(config.flags.get("--page-size", 1)))
    print(
        f"\n{case}: {len(found)} answers equal; acceptance length {lengths[0]:.3f}, one server's "
        f"{lengths[1]:.3f}; {prompt / len(found):.0f} prompt tokens and "
        f"{received / len(found):.0f} bytes of draft K/V per request, {received / seen:.3f} of "
        f"what their visible tokens need"
    )
    assert math.isclose(*lengths, rel_tol=0.05)
    assert lengths[0] > 2
    # What the decode server drafts from, another one has sent, or it has committed itself. (SGLang
    # warms up with a request of its own.)
    assert report["nonfinite_outputs"] == before["nonfinite_outputs"]
    assert seen * 0.999 <= received <= touched * 1.001
    assert sent["verify_steps"] == sent["draft_kv_received_bytes"] == 0


def turns(one: Server | Pair) -> list[list[int]]:
    """A conversation's answers; each turn begins with all before."""
    text, found = PAIR.prompts[0], []
    for _ in range(4):
        answer = one.generate(text, **GREEDY)
        found.append(answer["output_ids"])
        text += answer["text"] + "\n\ndef "
    return found


def of_their_own(one: Server | Pair) -> list[list[int]]:
    """Answers that depend on what a server knows of a request beside its K/V: penalties of the
    first token, and a seed."""
    ways: list[dict[str, Any]] = [
        {"frequency_penalty": 1.5, "presence_penalty": 0.5},
        {"temperature": 1.0, "sampling_seed": 7},
    ]
    prompt = PAIR.prompts[1]
    return [one.generate(prompt, **{**GREEDY, **way})["output_ids"] for way in ways]


def test_turns_of_a_conversation(servers: ServerSession) -> None:
    """The prefill server finds all turns before in its prefix cache, and sends what is there."""
    expected = turns(servers.server(SLIDING)), of_their_own(servers.server(SLIDING))
    with disaggregated(servers, SLIDING, SLIDING.changed("poisoned_draft_kv")) as both:
        before = both.decode.dflash()["nonfinite_outputs"]
        assert (turns(both), of_their_own(both)) == expected
        assert both.decode.dflash()["nonfinite_outputs"] == before


def test_prefixes_from_the_prefill_servers_host_memory(servers: ServerSession) -> None:
    """Their draft K/V is loaded back, and sent."""
    expected = workload.chatted(servers.server(CHATS))
    with disaggregated(servers, CHATS.having(**SMALL), CHATS.changed("poisoned_draft_kv")) as both:
        before = both.decode.dflash()["nonfinite_outputs"]
        found = workload.chatted(both)
        loaded, report = both.prefill.dflash(), both.decode.dflash()
        at_rest(both.prefill)
    workload.assert_same_outputs(found, expected)
    lengths = [workload.acceptance_length(of["chats"]) for of in (found, expected)]
    cached = sum(cached_tokens(found["chats"]))
    share = loaded["loaded_back_tokens"] / cached
    print(f"\n{share:.3f} of {cached} cached tokens loaded back; acceptance lengths {lengths}")
    assert share > 0.5 and loaded["loaded_back_draft_kv"] > 0.9 * loaded["loaded_back_tokens"]
    assert math.isclose(*lengths, rel_tol=0.03)
    assert report["nonfinite_outputs"] == before


def timed(url: str, text: str) -> tuple[float, float, int, list[int]]:
    """Seconds until a request's first token and until its last, tokens, and the tokens."""
    body = {"text": text, "sampling_params": {**GREEDY, "max_new_tokens": 96}, "stream": True}
    began, first, last = time.perf_counter(), 0.0, {}
    with requests.post(f"{url}/generate", json=body, stream=True, timeout=BOUND) as response:
        for line in response.iter_lines():
            if line.startswith(b"data: {"):
                first = first or time.perf_counter() - began
                last = json.loads(line[6:])
    tokens = last["output_ids"]
    return first, time.perf_counter() - began, len(tokens), tokens


def test_speed_beside_plain_decoding(servers: ServerSession) -> None:
    """Print the times of two pairs, one after the other; neither has to be the faster one."""
    prompts, outputs = PAIR.prompts[:24], []
    for config in (PLAIN.named("pd-plain"), DENSE):
        with disaggregated(servers, config) as both:
            for clients in (1, 4):
                began = time.perf_counter()
                with ThreadPoolExecutor(clients) as pool:
                    found = list(pool.map(lambda text: timed(both.url, text), prompts))
                took = time.perf_counter() - began
                print(
                    f"\n{config}, {clients} at a time: first token after "
                    f"{1000 * median(one[0] for one in found):.0f} ms (median), "
                    f"{sum(one[2] for one in found) / took:.1f} tokens per second"
                )
                outputs.append([one[3] for one in found])
    assert all(one == outputs[0] for one in outputs)


def killed(server: Server) -> None:
    """Its whole process group, which is the server's own."""
    os.killpg(server.process.pid, signal.SIGKILL)


def statuses(url: str, prompts: list[str], meanwhile: Callable[[], None]) -> list[int]:
    """Return the status codes of long answers, all at once, while `meanwhile` runs."""
    with ThreadPoolExecutor(len(prompts)) as pool:
        asked = [
            pool.submit(post, url, text, **{**GREEDY, "max_new_tokens": 400}) for text in prompts
        ]
        meanwhile()
        return [one.result().status_code for one in asked]


def test_a_killed_decode_server_leaks_nothing(servers: ServerSession) -> None:
    """Its requests end with an error; the prefill server serves another one."""
    prompts = [text * 8 for text in PAIR.prompts[:6]]
    with disaggregated(servers, DENSE) as both:
        expected = both.generate(prompts[0], **GREEDY)["output_ids"]

        def kill() -> None:
            time.sleep(0.3)
            killed(both.decode)

        found = statuses(both.url, prompts, kill)
        print(f"\nanswers after the decode server was killed: {found}")
        assert all(status >= 500 for status in found)
        at_rest(both.prefill)
        with (
            ForkedServer(servers.nursery, both.decode.config) as second,
            pair_router(both.prefill, second, both.bootstrap) as url,
        ):
            again = post(url, prompts[0], **GREEDY).json()
        assert again["output_ids"] == expected


def test_a_killed_prefill_server_leaks_nothing(servers: ServerSession) -> None:
    """Requests that have arrived are answered, the others end with an error, and no slot of the
    decode server is lost."""
    prompts = [text * 8 for text in PAIR.prompts[:6]]
    with disaggregated(servers, DENSE) as both:

        def kill() -> None:
            time.sleep(0.3)
            killed(both.prefill)

        found = statuses(both.url, prompts, kill)
        print(f"\nanswers after the prefill server was killed: {found}")
        at_rest(both.decode)
