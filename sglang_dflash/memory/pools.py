"""Division of a server's memory into pools: recurrent states beside K/V. No torch here.

A server's sizing and `sglang-dflash inspect` call the same functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sglang_dflash.memory.sizes import Charge, GroupKVSize

# SGLang's --mamba-full-memory-ratio, where none is given: memory of states over that of K/V.
STATE_RATIO = 0.9
# States that SGLang counts for a running request (`KVCacheConfigurator._calculate_mamba_ratio`)
# with a prefix cache, extra buffers and overlap.
STATES_PER_REQUEST = 5
# A session counts as one of so many tokens, or of the longest request that the server takes if that
# is shorter.
SESSION_TOKENS = 32768
# More than any pool of K/V holds.
_MOST_TOKENS = 2**62


def carried_requests(
    max_running: int, states: int, states_per_request: int = STATES_PER_REQUEST
) -> int:
    """Requests that so many recurrent states let run.

    Args:
        max_running: --max-running-requests.
        states_per_request: states that SGLang counts for each.
    """
    return min(max_running, max(0, states) // states_per_request)


def sglang_states(
    pool_bytes: int,
    state_bytes: int,
    snapshot_bytes: int = 0,
    states_per_request: int = STATES_PER_REQUEST,
) -> int:
    """States by SGLang's split (`KVCacheConfigurator._handle_max_mamba_cache`); 0 or less if none
    fits.

    Args:
        pool_bytes: for states, the K/V of target and draft, and draft steps.
        state_bytes: of a state.
        snapshot_bytes: that verification keeps of a request; 0 with replay.
        states_per_request: states that SGLang counts for a running request.
    """
    budget = pool_bytes * STATE_RATIO / (1 + STATE_RATIO)
    each = state_bytes + snapshot_bytes / states_per_request
    return int((budget - state_bytes - snapshot_bytes) // each)


class StateDemand(NamedTuple):
    """Demands that the number of recurrent states follows from, beside the memory.

    Attributes:
        max_running: --max-running-requests.
        states_per_request: states that SGLang counts for a running request.
        state_bytes: of a state.
        token_bytes: of a token's K/V: the target's, and that of draft layers without a ring.
        ring_bytes_per_request: of draft K/V in rings, per running request.
        context: largest number of tokens of a request; None if it is not known.
        most_tokens: --max-total-tokens; None if it is not given.
    """

    max_running: int
    states_per_request: int
    state_bytes: int
    token_bytes: int
    ring_bytes_per_request: int
    context: int | None
    most_tokens: int | None = None

    @classmethod
    def of(
        cls,
        groups: Sequence[GroupKVSize],
        *,
        max_running: int,
        states_per_request: int = STATES_PER_REQUEST,
        state_bytes: int,
        target_token_bytes: int,
        context: int | None,
        most_tokens: int | None = None,
    ) -> StateDemand:
        """The demand of a server with these groups of draft layers, whose rings are for all of its
        requests."""
        charge = Charge.of(groups, _MOST_TOKENS)
        return cls(
            max_running,
            states_per_request,
            state_bytes,
            target_token_bytes + charge.per_token,
            charge.once // max_running,
            context,
            most_tokens,
        )


def default_states(pool_bytes: int, step_bytes: int, demand: StateDemand) -> int:
    """States of a server that replays, where no flag says how many.

    As many as SGLang counts for the requests that its own split would let run, and one for every
    session of `SESSION_TOKENS` whose K/V the pool holds beside them; never more than by that split.
    With --max-total-tokens, also what the K/V leaves.

    Args:
        pool_bytes: for states, the K/V of target and draft, and draft steps.
        step_bytes: of draft steps.
    """
    most = sglang_states(
        pool_bytes, demand.state_bytes, states_per_request=demand.states_per_request
    )
    carried = carried_requests(demand.max_running, most, demand.states_per_request)
    if not carried:
        return most
    # SGLang has a state more, for padding.
    taken_bytes = step_bytes + carried * demand.ring_bytes_per_request + demand.state_bytes
    free_bytes = pool_bytes - taken_bytes
    states = _states_for_sessions(free_bytes, carried, demand)
    if demand.most_tokens is not None:
        kv_bytes = demand.most_tokens * demand.token_bytes
        states = max(states, (free_bytes - kv_bytes) // demand.state_bytes)
    return min(most, states)


def _states_for_sessions(free_bytes: int, carried: int, demand: StateDemand) -> int:
    """States of `carried` running requests, and one for each idle session whose K/V fits beside
    theirs.

    Args:
        free_bytes: for states, and K/V of whole tokens.
    """
    session_tokens = min(demand.context or SESSION_TOKENS, SESSION_TOKENS)
    session_bytes = demand.state_bytes + session_tokens * demand.token_bytes
    # A running request is a session with further states.
    further_states = (demand.states_per_request - 1) * carried
    sessions = (free_bytes - further_states * demand.state_bytes) // session_bytes
    idle_sessions = max(0, sessions - carried)
    return demand.states_per_request * carried + idle_sessions


class StatePool(NamedTuple):
    """SGLang's pool of recurrent states, unless a flag gives its size.

    Attributes:
        slots: states, of running requests and of cached prefixes.
        carried: requests that so many states let run.
        state_bytes: of the states.
        scratch_bytes: of the tensors that verification keeps: the inputs of replay, or snapshots.
    """

    slots: int
    carried: int
    state_bytes: int
    scratch_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.state_bytes + self.scratch_bytes


def state_pool(
    slots: int, max_running: int, state_bytes: int, replay_bytes: int, snapshot_bytes: int
) -> StatePool:
    """The pool of so many states, as SGLang 0.5.23 allocates it.

    Args:
        slots: states; 0 or less if none fits.
        max_running: --max-running-requests.
        state_bytes: of a state.
        replay_bytes, snapshot_bytes: that verification keeps of a request; one of them is 0.
    """
    carried = carried_requests(max_running, slots)
    scratch_bytes = (max_running + 1) * replay_bytes + (carried + 1) * snapshot_bytes
    return StatePool(slots, carried, (slots + 1) * state_bytes, scratch_bytes)


def at_a_time(tokens: int, carried: int, context: int, reserved: int) -> int:
    """Requests of `context` tokens, the answer included, that run at a time.

    Args:
        tokens: of the target's KV pool.
        carried: requests that recurrent states let run, however short.
        reserved: tokens that a verify step takes ahead of each.
    """
    return min(carried, tokens // (context + reserved))


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """Requests that a server's pools let run at a time.

    Attributes:
        tokens: of the target's KV pool.
        tokens_given: whether --max-total-tokens says how many.
        max_running: --max-running-requests.
        context: tokens of a request, at most.
        reserved: tokens that a step takes ahead of each request.
        states: recurrent states; None without such layers.
        states_per_request: states that SGLang counts for a running request.
        state_bytes: of a state.
    """

    tokens: int
    tokens_given: bool
    max_running: int
    context: int
    reserved: int
    states: int | None = None
    states_per_request: int = STATES_PER_REQUEST
    state_bytes: int = 0

    @property
    def carried(self) -> int:
        """Requests that the recurrent states let run."""
        if self.states is None:
            return self.max_running
        return carried_requests(self.max_running, self.states, self.states_per_request)

    def __str__(self) -> str:
        """The pools, how many long requests they run, and the flag that moves that."""
        length = min(self.context, SESSION_TOKENS)
        held = at_a_time(self.tokens, self.tokens, length, self.reserved)
        states = "" if self.states is None else (
            f", {self.states:,} recurrent states carry {self.states // self.states_per_request} "
            f"({self.states_per_request} each)"
        )  # fmt: skip
        if min(held, self.carried) == self.max_running:
            bound = f"--max-running-requests {self.max_running} bounds it"
        elif self.carried < held:
            bound = "the states bound it: --max-mamba-cache-size"
        else:
            flag = "--max-total-tokens" if self.tokens_given else "--mem-fraction-static"
            bound = f"K/V bounds it: {flag}"
        running = f"{min(held, self.carried)} requests of {length:,} tokens run at a time"
        if not held:
            longest = max(self.tokens - self.reserved, 0)
            running = f"a request runs up to {longest:,} tokens, not {length:,}"
        holds = f"holds {held}" if held else "holds no more"
        return f"{running}: K/V of {self.tokens:,} tokens {holds}{states}; {bound}"

    def shortfall(self) -> str | None:
        """Return why fewer requests run at a time than --max-running-requests says, however short
        they are; None if as many do."""
        # SGLang runs no more than one request for two tokens.
        by_tokens = self.tokens // 2
        admitted = min(self.carried, by_tokens)
        if admitted >= self.max_running:
            return None
        beginning = f"--max-running-requests {self.max_running}: {admitted} run at a time, for "
        if self.states is None or by_tokens < self.carried:
            return f"{beginning}K/V has {self.tokens:,} tokens; raise --mem-fraction-static"
        needed = self.max_running * self.states_per_request
        gib = (needed - self.states) * self.state_bytes / 2**30
        return (
            f"{beginning}{self.states} recurrent states carry no more "
            f"({self.states_per_request} each); "
            f"--max-mamba-cache-size {needed} carries {self.max_running}, for {gib:.2f} GiB of "
            f"K/V, and --max-running-requests {admitted} frees what is reserved for more requests"
        )
