"""The default number of a server's recurrent states, and its log lines about its pools."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from sglang_dflash.memory.pools import (
    SESSION_TOKENS,
    Capacity,
    StateDemand,
    carried_requests,
    default_states,
    sglang_states,
)
from sglang_dflash.memory.sizes import GroupKVSize

GIB = 2**30
# Of Qwen3.6-35B-A3B and its draft: a state, a token of target and draft K/V.
STATE, TOKEN = 64_389_120, 24_580
GRID = list(product((2, 8, 60), (1, 8, 48), (2048, 65536, None), (0, 80 << 20), (0, GIB)))


def demand(requests: int, context: int | None, ring: int = 0, **others: int) -> StateDemand:
    return StateDemand(requests, 5, STATE, TOKEN, ring, context, **others)


@pytest.mark.parametrize(("gib", "requests", "context", "ring", "steps"), GRID)
def test_as_many_requests_and_more_kv_than_by_sglangs_split(
    gib: int, requests: int, context: int | None, ring: int, steps: int
) -> None:
    memory = gib * GIB
    most = sglang_states(memory, STATE)
    states = default_states(memory, steps, demand(requests, context, ring))
    carried = carried_requests(requests, most)
    assert states <= most and carried_requests(requests, states) == carried
    if states == most or not carried:
        return
    # Every session that the K/V holds has a state, or the last one's would leave it none of K/V.
    tokens = (memory - steps - carried * ring - (states + 1) * STATE) // TOKEN
    sessions = tokens // min(context or SESSION_TOKENS, SESSION_TOKENS)
    paused = states - 5 * carried
    assert max(0, sessions - carried) - paused in (0, 1)


def test_states_get_what_a_bounded_kv_pool_leaves() -> None:
    memory, most = 60 * GIB, sglang_states(60 * GIB, STATE)
    free, bounded, small = (
        default_states(memory, 0, demand(48, 65536, **given))
        for given in ({}, {"most_tokens": 1_500_000}, {"most_tokens": 10_000})
    )
    assert 5 * 48 < free < bounded == (memory - STATE - 1_500_000 * TOKEN) // STATE < most
    assert small == most


def test_a_demand_counts_a_layer_once() -> None:
    """Per token without a ring, with its tags otherwise."""
    groups = [GroupKVSize(4096, None), GroupKVSize(20480, 48 * 100)]
    found = StateDemand.of(
        groups, max_running=48, state_bytes=STATE, target_token_bytes=20480, context=None
    )
    assert found.token_bytes == 20480 + 4096 + 4
    assert found.ring_bytes_per_request == 100 * (20480 + 5)


CAPACITY = Capacity(
    tokens=1_800_000, tokens_given=False, max_running=48, context=65536, reserved=32, states=241,
    state_bytes=STATE,
)  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({}, "48 requests of 32,768 tokens run at a time: K/V of 1,800,000 tokens holds 54, 241 "
         "recurrent states carry 48 (5 each); --max-running-requests 48 bounds it"),
        ({"tokens": 900_000}, "27 requests of 32,768 tokens run at a time: K/V of 900,000 tokens "
         "holds 27, 241 recurrent states carry 48 (5 each); K/V bounds it: --mem-fraction-static"),
        ({"tokens": 900_000, "tokens_given": True}, "K/V bounds it: --max-total-tokens"),
        ({"states": 35}, "35 recurrent states carry 7 (5 each); the states bound it: "
         "--max-mamba-cache-size"),
        ({"tokens": 20_000}, "a request runs up to 19,968 tokens, not 32,768: K/V of 20,000 tokens "
         "holds no more, 241 recurrent states carry 48 (5 each); K/V bounds it: --mem-fraction"),
        ({"states": None, "context": 4096}, "48 requests of 4,096 tokens run at a time: K/V of "
         "1,800,000 tokens holds 436; --max-running-requests 48 bounds it"),
    ],
)  # fmt: skip
def test_what_bounds_the_requests_is_said(changed: dict[str, int], said: str) -> None:
    assert said in str(replace(CAPACITY, **changed))


def test_fewer_requests_than_asked_are_a_warning() -> None:
    assert CAPACITY.shortfall() is None
    assert replace(CAPACITY, states=35).shortfall() == (
        "--max-running-requests 48: 7 run at a time, for 35 recurrent states carry no more (5 "
        "each); --max-mamba-cache-size 240 carries 48, for 12.29 GiB of K/V, and "
        "--max-running-requests 7 frees what is reserved for more requests"
    )
    few = "--max-running-requests 48: 20 run at a time, for K/V has 40 tokens; raise --mem-fraction"
    for states in (None, 241):
        short = replace(CAPACITY, tokens=40, states=states).shortfall()
        assert short is not None and short.startswith(few)
