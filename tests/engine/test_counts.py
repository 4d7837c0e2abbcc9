"""Acceptance as the answers, /server_info and /metrics tell it: the same integers."""

from __future__ import annotations

import re
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import requests
from prometheus_client.parser import text_string_to_metric_families

from sglang_dflash.drafting.acceptance_length import VerifySteps
from sglang_dflash.tools.bench.server import Server
from tests.engine import workload
from tests.engine.client import ask, post, stream, together
from tests.engine.processors import Nudged
from tests.engine.servers import ADAPTIVE, PAGE16_NO_OVERLAP, PAGE16_WINDOW, TIGHT, ServerConfig

COUNTS = ("verify_steps", "committed_tokens", "undrafted_steps", "undrafted_tokens")
# SGLang's own count, which does not tell steps with drafts from those without.
SGLANGS = "sglang:spec_verify_calls_total"


class Reading:
    """The counts of /server_info and /metrics at a time when no request runs."""

    def __init__(self, server: Server) -> None:
        # Answered by the process that counts: afterwards all counts are written.
        self.report = server.dflash()
        self.series: Counter[str] = Counter()
        text = requests.get(f"{server.url}/metrics", timeout=60).text
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name.startswith("sglang_dflash_") or sample.name == SGLANGS:
                    position = sample.labels.get("position", "")
                    self.series[sample.name + position] += int(sample.value)

    def total(self, name: str) -> int:
        return self.series[f"sglang_dflash_{name}_total"]


def with_drafts(server: Server) -> list[dict[str, Any]]:
    """Requests that end in every way there is, eight at a time: most inside a block."""
    texts = workload.prompts()["demo"]
    send = {"max_new_tokens": 40, "ignore_eos": True}
    full = ask(server, texts[0], **send)
    stop = full["text"][len(full["text"]) // 2 :][:4]
    token = next(
        t for i, t in enumerate(full["output_ids"]) if i > 10 and full["output_ids"].index(t) == i
    )
    ends = [
        *({**send, "max_new_tokens": n} for n in (1, 2, 3, 7, 8, 9, 23, 30)),
        {**send, "stop": [stop]},
        {**send, "stop_token_ids": [token]},
        # The demo texts continue beyond this: the tokenizer's own end does not come.
        {"max_new_tokens": 150, "ignore_eos": False},
        {**send, "regex": r"[a-z]{1,6} = [0-9]{1,3}"},
        {**send, "temperature": 1.0, "top_k": 20},
    ]
    jobs = [(texts[0 if "stop" in str(how) else i], how) for i, how in enumerate(ends)]
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda job: ask(server, job[0], **job[1]), jobs))
    reasons = [answer["meta_info"]["finish_reason"]["type"] for answer in answers]
    assert {"length", "stop"} <= set(reasons)
    return [full, *answers, *aborted(server), *crowd(server)]


def aborted(server: Server) -> list[dict[str, Any]]:
    """A request that is aborted while it runs, beside one that is not."""
    begun = threading.Event()
    body = {
        "text": workload.prompts()["demo"][1],
        "rid": "counted-abort",
        "sampling_params": {"temperature": 0, "max_new_tokens": 20_000, "ignore_eos": True},
    }
    with ThreadPoolExecutor(2) as pool:
        long = pool.submit(stream, server, body, begun)
        assert begun.wait(60)
        short = pool.submit(ask, server, workload.prompts()["demo"][2])
        short.result()
        post(server, "abort_request", {"rid": "counted-abort"})
        answer = long.result()
    assert answer["meta_info"]["finish_reason"]["type"] == "abort"
    return [answer, short.result()]


def crowd(server: Server) -> list[dict[str, Any]]:
    """Many requests of different lengths at once: batches shrink and grow at every step."""
    texts = workload.prompts()["short"]
    return together(
        lambda text=text, n=n: ask(server, text, max_new_tokens=3 * n + 5)
        for n, text in enumerate(texts)
    )


def without_drafts(server: Server) -> list[dict[str, Any]]:
    texts = workload.prompts()["demo"]
    processor = {"custom_logit_processor": Nudged.to_str()}
    params = {"tokens": [77], "by": 1.0}
    return together(
        lambda text=text, n=n: ask(server, text, processor, custom_params=params, max_new_tokens=n)
        for text, n in zip(texts, (1, 2, 9, 16), strict=False)
    )


@pytest.mark.parametrize("config", [PAGE16_NO_OVERLAP, PAGE16_WINDOW], ids=str)
def test_all_accounts_of_the_acceptance_agree(config: ServerConfig, server: Server) -> None:
    """They agree with overlap scheduling, which runs a step too many per request, and without."""
    before = Reading(server)
    # Some of both kinds run at the same time.
    drafted, undrafted = together([lambda: with_drafts(server), lambda: without_drafts(server)])
    after = Reading(server)
    expected, single = workload.counted(drafted), workload.counted(undrafted)
    assert expected.steps > 100 and expected.tokens > 1.5 * expected.steps
    assert single == VerifySteps(0 + 1 + 8 + 15, 0 + 1 + 8 + 15)
    totals = [expected.steps, expected.tokens, single.steps, single.tokens]
    assert [after.report[name] - before.report[name] for name in COUNTS] == totals
    assert [after.total(name) - before.total(name) for name in COUNTS] == totals
    assert after.series[SGLANGS] - before.series[SGLANGS] == expected.steps + single.steps
    check_totals(after)


@pytest.mark.server(ADAPTIVE)
def test_rates_are_of_the_drafts_of_each_step(server: Server) -> None:
    """In the answer, and in the log and /metrics every 40 steps, by SGLang's own other numbers: an
    answer's steps by the tokens that they verified, and the means of what they committed and
    verified."""
    block = server.dflash()["block_size"]
    texts = [*workload.prompts()["short"][8:11], *workload.prompts()["demo"][:2]]
    narrower = False
    for text in texts:
        before = server.dflash()["width_steps"]
        info = ask(server, text, max_new_tokens=100)["meta_info"]
        after = server.dflash()["width_steps"]
        taken = {int(width): steps - before[width] for width, steps in after.items()}
        proposed = sum(steps * (width - 1) for width, steps in taken.items())
        # Overlap runs a step too many.
        assert proposed - block < info["spec_num_proposed_drafts"] <= proposed
        narrower |= info["spec_num_proposed_drafts"] < (block - 1) * info["spec_verify_ct"]
        rate = info["spec_num_correct_drafts"] / (info["spec_num_proposed_drafts"] or 1)
        assert info["spec_accept_rate"] == rate
    assert narrower
    shown = r"accept len: ([0-9.]+), accept rate: ([0-9.]+), cap len: ([0-9.]+)"
    lines = [tuple(map(float, line)) for line in re.findall(shown, server.log.read_text())]
    assert len(lines) > 2
    for committed, rate, verified in lines:
        # All three are rounded to two digits.
        least, most = ((committed - 1 + e) / max(verified - 1 - e, 0.005) for e in (-0.005, 0.005))
        assert least - 0.0051 <= rate <= most + 0.0051
    assert round(gauge(server, "spec_accept_rate"), 2) == lines[-1][1]


def gauge(server: Server, name: str) -> float:
    text = requests.get(f"{server.url}/metrics", timeout=60).text
    (line,) = [line for line in text.splitlines() if line.startswith(f"sglang:{name}{{")]
    return float(line.split()[-1])


@pytest.mark.server(TIGHT)
def test_the_steps_of_retracted_requests_agree(server: Server) -> None:
    """A step whose request was retracted meanwhile is lost: it counts nowhere. The answers' tokens
    contain one or none of a prefill per retraction."""
    before = Reading(server)
    texts = workload.prompts()["demo"][:8]
    answers = together(lambda text=text: ask(server, text, max_new_tokens=120) for text in texts)
    after = Reading(server)
    expected = workload.counted(answers)
    retractions = sum(answer["meta_info"]["num_retractions"] for answer in answers)
    assert retractions > 0
    for steps, tokens in (
        (after.report[name] - before.report[name] for name in COUNTS[:2]),
        (after.total(name) - before.total(name) for name in COUNTS[:2]),
    ):
        assert steps == expected.steps == after.series[SGLANGS] - before.series[SGLANGS]
        assert expected.tokens - retractions <= tokens <= expected.tokens
    check_totals(after)


def check_totals(reading: Reading) -> None:
    """A reading agrees with itself."""
    report = reading.report
    steps, tokens = report["verify_steps"], report["committed_tokens"]
    assert [reading.total(name) for name in COUNTS] == [report[name] for name in COUNTS]
    assert report["acceptance_length"] == round(tokens / steps, 4)
    # Beside drafts there are bonus tokens, at most one per step.
    assert sum(report["accepted_drafts"]) <= tokens <= sum(report["accepted_drafts"]) + steps
    for position, accepted in enumerate(report["accepted_drafts"], 1):
        assert reading.total("accepted_drafts") == 0
        assert reading.series[f"sglang_dflash_accepted_drafts_total{position}"] == accepted
        assert report["acceptance_by_position"][position - 1] == round(accepted / steps, 4)
