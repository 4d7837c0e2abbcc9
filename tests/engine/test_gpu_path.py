"""The CUDA path of a whole server, on a faked GPU (tests/fake_gpu).

The dense pair with graphs is in the tier `engine`, everything else in `long`:

    bash launch/test.sh tests/engine/test_gpu_path.py -m "engine or long"
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from typing import Any

import pytest
import requests

from sglang_dflash.common.errors import Failed
from sglang_dflash.tools.bench.server import Server
from tests.conftest import FUZZ
from tests.engine import checks, client, faults, front_ends, workload
from tests.engine import servers as s
from tests.engine.checks import Seen
from tests.engine.comparison import Row, cases, compare
from tests.engine.near_ties import assert_same_but_for_near_ties, beside_likeliest
from tests.engine.servers import Ask, ServerConfig
from tests.engine.session import ServerSession
from tests.fake_gpu import asks
from tests.fake_gpu import servers as g

# The loop waits for the results of a step in order to send them.
LOOP = (
    "Event.synchronize at sglang/srt/managers/scheduler_components/batch_result_processor.py:"
    "process_batch_result_"
)

# FlashInfer plans a step with lengths that the host has to know.
PLANNED = "Stream.synchronize at sglang/srt/managers/overlap_utils.py:resolve_seq_lens_cpu"
# FlashInfer's plan of a prefill reads its lists on the host.
PREFILL_PLAN = "_to_copy at sglang/srt/layers/attention/flashinfer_backend.py:call_begin_forward"


def report(server: Server) -> dict[str, Any]:
    """Return the scheduler's report of its GPU."""
    return server.info()["internal_states"][0]["fake_gpu"]


def scored_alike(seen: Seen) -> None:
    """Log-probabilities, of the answers that have them."""
    name = "output_token_logprobs"
    for ours, theirs in zip(
        checks.answers_of(seen.ours), checks.answers_of(seen.theirs), strict=True
    ):
        if name in ours["meta_info"]:
            got, expected = ([x[0] for x in a["meta_info"][name]] for a in (ours, theirs))
            assert got == pytest.approx(expected, abs=1e-3)


def well_drafted(seen: Seen) -> None:
    """Text that the models have memorized is drafted well, though the target is quantized."""
    checks.drafted(seen)
    assert workload.acceptance_length(seen.ours["alone"]) > 4


def retracted(seen: Seen) -> None:
    assert sum(a["meta_info"]["num_retractions"] for a in checks.answers_of(seen.ours)) > 0


GREEDY = beside_likeliest(asks.greedy)
ALL = (asks.greedy, asks.every_sort, asks.aborted)
TABLE = (Row(g.DFLASH, s.PLAIN, ALL, (checks.drafted, checks.proposals_from_graphs, scored_alike)),)
LONG = (
    # The plain servers that rows are compared with answer as the CPU's, up to near-ties of 16 bits.
    Row(g.PLAIN, s.PLAIN, ALL),
    Row(g.OWN_KERNELS, s.PLAIN, (asks.greedy,), (checks.drafted, checks.proposals_from_graphs)),
    Row(g.BUILTIN, s.PLAIN, (asks.greedy,)),
    Row(g.EAGER, s.PLAIN, (asks.greedy, asks.every_sort), (checks.drafted,)),
    Row(g.NO_OVERLAP, s.PLAIN, ALL, (checks.drafted, checks.proposals_from_graphs)),
    Row(g.NO_DRAFT_GRAPHS, s.PLAIN, (asks.greedy,), (checks.drafted,)),
    Row(g.LOOKED_UP, s.PLAIN, ALL, (checks.drafted,)),
    Row(g.TIGHT, s.PLAIN, (asks.greedy,), (checks.drafted, retracted)),
    Row(g.TIGHT, s.PLAIN, (asks.every_sort, asks.aborted), (scored_alike,)),
    Row(g.TOLD, front_ends.TOLD_PLAIN, (front_ends.chat,), (front_ends.calls_told,)),
    Row(g.SECOND_DRAFT, s.PLAIN, (asks.greedy,), (checks.drafted,)),
    Row(g.ONE_REQUEST, s.PLAIN, (asks.every_sort,), (checks.drafted,)),
    Row(g.SEEDED, g.SEEDED_PLAIN, (asks.seeded,), (checks.drafted,)),
    Row(g.TP2, s.PLAIN, (asks.greedy,), (checks.drafted, checks.two_ranks)),
    Row(g.FA3, g.FA3_PLAIN, (asks.greedy, asks.every_sort), (checks.drafted,)),
    Row(g.FA3_SHORT, g.FA3_SHORT_PLAIN, (asks.to_the_limit,), (checks.drafted,)),
    Row(g.FLASHINFER_TARGET, g.FLASHINFER_PLAIN, (asks.greedy, asks.every_sort), (checks.drafted,)),
    Row(g.FLASHINFER, s.PLAIN, (asks.every_sort,), (checks.drafted,)),
    Row(g.BARE, s.PLAIN, ALL, (checks.drafted,)),
    Row(g.DEFAULT, g.DEFAULT_PLAIN, (asks.greedy,), (checks.drafted,)),
    Row(g.PREFILL_GRAPHS, s.PLAIN, (asks.greedy,), (checks.drafted,)),
    *(
        Row(config, g.HYBRID_PLAIN, (asks.hybrid,), (checks.drafted, checks.rolls_back_by(how)))
        for how, config in (("replay", g.HYBRID_REPLAY), ("snapshot", g.HYBRID_SNAPSHOT))
    ),
    Row(g.HYBRID_BUILTIN, g.HYBRID_PLAIN, (asks.hybrid,)),
    Row(
        g.HYBRID_EXACT,
        g.HYBRID_REFERENCE,
        (asks.greedy,),
        (checks.drafted, retracted, checks.rolls_back_by("replay")),
    ),
    Row(g.HYBRID_EXACT, g.HYBRID_REFERENCE, (asks.every_sort, asks.aborted), (scored_alike,)),
    Row(g.NVFP4_PLAIN, g.NVFP4_VALUES, (GREEDY,), same=assert_same_but_for_near_ties),
    Row(g.NVFP4, g.NVFP4_PLAIN, ALL[:1], (well_drafted, checks.proposals_from_graphs)),
    Row(g.NVFP4, g.NVFP4_PLAIN, ALL[1:], (checks.drafted, checks.proposals_from_graphs)),
    Row(g.NVFP4_DFLASH2, g.NVFP4_PLAIN, (asks.greedy,), (checks.drafted,)),
)


@pytest.mark.parametrize(
    ("config", "row", "ask"), cases((*TABLE, *(row._replace(long=row.asked) for row in LONG)))
)
def test_answers_are_plain_decodings(
    config: ServerConfig, row: Row, ask: Ask, answers: Any, server: Server, servers: ServerSession
) -> None:
    compare(row, ask, answers, server, servers)


@pytest.mark.parametrize(
    "config",
    [
        g.DFLASH,
        *(
            pytest.param(c, marks=pytest.mark.long)
            for c in (
                g.BUILTIN,
                g.OWN_KERNELS,
                g.LOOKED_UP,
                g.FA3,
                g.FLASHINFER_TARGET,
                g.HYBRID_REPLAY,
                g.NVFP4,
            )
        ),
    ],
    ids=str,
)
def test_a_decode_step_waits_for_its_results_only(config: ServerConfig, server: Server) -> None:
    """One wait per step, where the loop reads what the step has computed; host memory that is
    copied to the GPU is pinned; and steps leave no more bytes than those before."""
    before = report(server)
    answer = client.ask(server, asks.PROMPTS["short"][7], max_new_tokens=64)
    after = report(server)
    waits = Counter(after["waits"]) - Counter(before["waits"])
    planned = {PLANNED, PREFILL_PLAN} if config == g.FLASHINFER_TARGET else set()
    assert waits.keys() == {f"{LOOP}prefill", f"{LOOP}decode"} | planned, waits
    # Of the one prefill, whatever the number of steps.
    assert waits[PREFILL_PLAN] <= 5
    # Under overlap a step is launched before the last one's end is known.
    steps = answer["meta_info"]["spec_verify_ct"]
    assert waits[f"{LOOP}prefill"] == 1 and 0 <= waits[f"{LOOP}decode"] - steps <= 1
    assert after["uploads"] == {}
    # A step of another width has tensors of other sizes.
    steady = after["held"][-steps + 2 : -2]
    assert max(steady[len(steady) // 2 :]) <= max(steady[: len(steady) // 2]), steady


def held(server: Server) -> int:
    """Return the number of storages on its GPU at rest. The last step's tensors stay until the
    next step, in any size."""
    client.at_rest(server)
    client.ask(server, asks.PROMPTS["demo"][0], max_new_tokens=8)
    client.at_rest(server)
    return sum(report(server)["storages"].values())


@pytest.mark.parametrize(
    "config",
    [g.DFLASH, *(pytest.param(c, marks=pytest.mark.long) for c in (g.LOOKED_UP, g.TIGHT))],
    ids=str,
)
def test_requests_leave_no_memory_behind(config: ServerConfig, server: Server) -> None:
    """Run a batch of each sort, then once more, or 20 times if SGLANG_DFLASH_FUZZ is 20."""
    before = 0
    for i in range(1 + FUZZ):
        if i == 1:
            before = held(server)
        asks.aborted(server)
        asks.sampled(server)
        asks.constrained(server)
    assert held(server) == before


@pytest.mark.long
@pytest.mark.parametrize("config", [g.SIZED, g.SIZED_WINDOW, g.HYBRID_SIZED], ids=str)
def test_the_pools_are_as_large_as_inspect_says(config: ServerConfig, server: Server) -> None:
    """`inspect` is given the server's launch command; as much memory is left, too."""
    launch = ["--", "python", "-m", "sglang.launch_server", *map(str, config.args())]
    inspect = ["-m", "sglang_dflash", "inspect", "--offline", "--json", "--memory-gib", "3"]
    command = [sys.executable, *inspect, *launch]
    said = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    tokens = server.info()["max_total_num_tokens"]
    assert tokens == pytest.approx(said["target_tokens"], rel=0.01)
    # Out of what is left SGLang takes 64 bytes per KV slot, for its lists of them.
    gpu, left = report(server), said["memory_bytes"]["left to SGLang"] - 64 * tokens
    assert gpu["total"] - gpu["bytes"] == pytest.approx(left, rel=0.01)


@pytest.mark.long
@pytest.mark.server(g.FAULTY)
@pytest.mark.recorded(s.PLAIN, asks.greedy)
def test_a_failed_step_ends_its_request_only(server: Server, servers: ServerSession) -> None:
    """Requests beside it get their answers; afterwards a step waits and holds as before."""
    servers.path(s.FAULTS).mkdir(exist_ok=True)
    expected = servers.answers(s.PLAIN, asks.greedy)["together"][:2]
    before = 0
    for i in range(2):
        if i == 1:
            before = held(server)
        for place in (place for place in faults.DFLASH_PLACES if place != "merge"):
            answers = beside_a_fault(server, place, str(i))
            workload.assert_same_outputs(answers, expected)
    assert held(server) == before


def beside_a_fault(server: Server, place: str, name: str) -> list[Any]:
    """The answers to two requests beside one whose step fails at that place."""
    guilty = {
        "text": asks.PROMPTS["short"][9],
        "rid": f"guilty.{place}.{0 if 'prefill' in place else 1}.{name}",
        "sampling_params": client.GREEDY,
    }
    ended, *answers = client.together(
        [
            lambda: requests.post(f"{server.url}/generate", json=guilty),
            *(
                lambda text=text: client.ask(server, text, max_new_tokens=asks.NEW_TOKENS)
                for text in asks.PROMPTS["demo"][2:4]
            ),
        ]
    )
    assert ended.status_code == 500 and "Fault" in ended.text, place
    return answers


@pytest.mark.long
@pytest.mark.parametrize("config", [g.DFLASH, g.FLASHINFER, g.BARE, g.BUILTIN], ids=str)
def test_sampled_requests_are_answered(config: ServerConfig, server: Server) -> None:
    """A step of theirs waits as often as a greedy one."""
    before = report(server)
    answers = asks.sampled(server)
    assert all(len(answer["output_ids"]) == asks.NEW_TOKENS for answer in answers)
    waits = Counter(report(server)["waits"]) - Counter(before["waits"])
    assert waits.keys() == {f"{LOOP}prefill", f"{LOOP}decode"}, waits


@pytest.mark.long
def test_sglangs_worker_needs_flashinfer(servers: ServerSession) -> None:
    """It does at start, for a rehearsal of sampling (docs/upstream.md); ours does not."""
    with pytest.raises(Failed, match="No module named 'flashinfer"):
        servers.own(g.BARE_BUILTIN).__enter__()
