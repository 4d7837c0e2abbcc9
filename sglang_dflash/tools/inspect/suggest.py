"""The most requests of a length that run at a time: with the settings that were asked for, with
others, and the launch command. No torch.

Every number is found by `memory.memory_of` with those settings: one request more does not fit.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields, replace
from itertools import pairwise
from typing import Any, NamedTuple

from sglang_dflash.checkpoint.published import ModelFacts, repository_of
from sglang_dflash.common.errors import ConfigError
from sglang_dflash.drafting.options import Options
from sglang_dflash.memory.pools import STATES_PER_REQUEST
from sglang_dflash.serving.metrics.server_info import BUILTIN, OURS
from sglang_dflash.serving.start.unserved import BUILTIN_FLAG
from sglang_dflash.tools.inspect.launch_command import server_flags
from sglang_dflash.tools.inspect.memory import is_quantized, memory_of
from sglang_dflash.tools.inspect.report import decide_pair
from sglang_dflash.tools.inspect.serving import Serving

# More requests than any server runs.
_MOST = 4096
# GPUs that are tried beside the ones asked for, as multiples.
_MORE_GPUS = (2, 4, 8)
# Set-ups that are shown, at most.
_SHOWN = 5


class Pair(NamedTuple):
    """A pair and the settings that were asked for.

    Attributes:
        builtin: the setting with which SGLang's worker serves; None without one.
        others: further flags of the server, in words, which the figures do not follow.
    """

    target: ModelFacts
    draft: ModelFacts
    options: Options
    serving: Serving
    builtin: str | None
    others: tuple[str, ...] = ()


class SetUp(NamedTuple):
    """Settings other than those asked for.

    Attributes:
        options, serving: the fields that differ.
        cost: what a user gives for them; empty for nothing.
    """

    options: Mapping[str, Any]
    serving: Mapping[str, Any]
    cost: str

    def plus(self, other: SetUp) -> SetUp:
        """Both set-ups at once."""
        cost = "; ".join(filter(None, (self.cost, other.cost)))
        return SetUp({**self.options, **other.options}, {**self.serving, **other.serving}, cost)


AS_ASKED = SetUp({}, {}, "")


def suggest(pair: Pair, sessions: int | None = None) -> dict[str, Any]:
    """Return the settings that would fit at `serving.context`.

    Args:
        sessions: requests to run at a time; None for as many as fit.

    Returns:
        `sessions`: the number asked for; `most`: requests at a time with the settings asked for, by
        "as served", "SGLang's worker" and "without a draft"; `command`: the launch command for the
        first of them, or for `sessions`, None if they do not fit; `set_ups`: others that run more,
        cheapest first, each with `sessions`, `flags`, `cost` and `command`.
    """
    served = most(pair, AS_ASKED)
    counts: dict[str, Any] = {
        "as served": served,
        "SGLang's worker": most(pair._replace(builtin=BUILTIN_FLAG), AS_ASKED),
        "without a draft": most(pair, AS_ASKED, drafts=False),
    }
    requests = served if sessions is None else min(sessions, served)
    command = command_of(pair, AS_ASKED, requests) if requests >= (sessions or 1) else None
    rows = list[dict[str, Any]]()
    if command is None or sessions is None:
        for set_up, count in _others(pair, sessions, served):
            number = count if sessions is None else sessions
            rows.append(
                {
                    "sessions": count,
                    "flags": flags_of(set_up),
                    "cost": set_up.cost,
                    "command": command_of(pair, set_up, number),
                }
            )
    return {"sessions": sessions, "most": counts, "command": command, "set_ups": rows[:_SHOWN]}


def most(pair: Pair, set_up: SetUp, *, drafts: bool = True) -> int:
    """Requests of `serving.context` tokens that run at a time, at most; 0 if none does.

    Args:
        drafts: False for the target alone.
    """
    options = replace(pair.options, **set_up.options)
    serving = replace(pair.serving, **set_up.serving)
    try:
        decision, resolved = decide_pair(pair.target, pair.draft, options, serving, pair.builtin)
    except ConfigError:
        return 0
    fact = "requests_at_context" if drafts else "requests_at_context_without_draft"
    recurrent = bool(decision.geometry.recurrent_layers)

    def fits(requests: int) -> bool:
        bounded = replace(serving, **_bounds(requests, recurrent))
        try:
            memory = memory_of(pair.target, pair.draft, decision, resolved, bounded)
            resolved.check_room(memory["target_tokens"])
        except ConfigError:
            return False
        return bool(memory[fact] >= requests)

    least, beyond = 0, 1
    while beyond <= _MOST and fits(beyond):
        least, beyond = beyond, 2 * beyond
    while beyond - least > 1:
        middle = (least + beyond) // 2
        least, beyond = (middle, beyond) if fits(middle) else (least, middle)
    return least


def _bounds(requests: int, recurrent: bool) -> dict[str, Any]:
    """The settings that give other requests no memory."""
    states: dict[str, Any] = (
        {"max_mamba_cache_size": requests * STATES_PER_REQUEST} if recurrent else {}
    )
    return {"max_running_requests": requests, **states}


def _others(pair: Pair, sessions: int | None, served: int) -> Iterator[tuple[SetUp, int]]:
    """Set-ups that run `sessions` requests, or more than are served as asked for, and how many, up
    to the first that takes nothing but more GPUs. None adds to the cost of one before it."""
    enough = list[SetUp]()
    for set_up in _set_ups(pair, combined=sessions is not None):
        if any(each.cost in set_up.cost for each in enough):
            continue
        count = most(pair, set_up)
        if count >= (sessions or served + 1):
            enough.append(set_up)
            yield set_up, count
            if set(set_up.serving) == {"tp_size"}:
                return


def _set_ups(pair: Pair, *, combined: bool) -> Iterator[SetUp]:
    """Set-ups by what they cost, the cheapest first; one change each, or several."""
    single = list(_changes(pair))
    yield from single
    gpus = [_gpus(pair.serving.tp_size * times) for times in _MORE_GPUS]
    if not combined:
        yield gpus[0]
        return
    for first, second in pairwise(single):
        yield first.plus(second)
    if len(single) > 2:
        yield single[0].plus(single[1]).plus(single[2])
    for gpu_change in gpus:
        yield gpu_change
        for change in single:
            yield change.plus(gpu_change)


def _changes(pair: Pair) -> Iterator[SetUp]:
    """Changes on the same GPUs."""
    options, serving = pair.options, pair.serving
    decision, resolved = decide_pair(pair.target, pair.draft, options, serving, pair.builtin)
    if decision.worker == OURS and decision.config is not None and options.window is None:
        windows = [group.reach.tokens for group in decision.config.groups(resolved.reach)]
        if None in windows:
            window = max((each for each in windows if each), default=4096)
            cost = "drafts of long contexts may be accepted less often"
            yield SetUp({"window": window}, {}, cost)
    if serving.kv_dtype in (None, "bfloat16", "float16"):
        yield SetUp({}, {"kv_dtype": "fp8_e4m3"}, "K/V in 8 bits: other outputs")
    if serving.quantization is None and not is_quantized(pair.target):
        yield SetUp({}, {"quantization": "fp8"}, "weights in 8 bits: other outputs")


def _gpus(count: int) -> SetUp:
    return SetUp({}, {"tp_size": count}, f"{count} GPUs")


def flags_of(set_up: SetUp) -> str:
    """The flags of a server for the settings of a set-up."""
    return shlex.join(server_flags({**set_up.options, **set_up.serving}))


def command_of(pair: Pair, set_up: SetUp, requests: int) -> str:
    """The launch command of a server that runs so many requests."""
    settings = {**_given(pair.options), **_given(pair.serving)}
    if pair.serving.kv_memory_gib is None:
        # Without the flag SGLang chooses another fraction, by the GPU and the model.
        settings["mem_fraction"] = pair.serving.mem_fraction
    settings |= {**set_up.options, **set_up.serving}
    decision, _ = decide_pair(pair.target, pair.draft, pair.options, pair.serving, pair.builtin)
    settings |= _bounds(requests, bool(decision.geometry.recurrent_layers))
    worker = BUILTIN_FLAG.split() if decision.worker == BUILTIN and pair.builtin else []
    draft = repository_of(pair.draft.name)
    # Its commit is not known here: `words.earlier_revision` tells.
    revision = ["--speculative-draft-model-revision", "COMMIT"] if draft != pair.draft.name else []
    words = [
        "sglang", "serve", "--model-path", pair.target.name, "--speculative-algorithm", "DFLASH",
        "--speculative-draft-model-path", draft, *revision, *worker, *server_flags(settings),
        *pair.others,
    ]  # fmt: skip
    return shlex.join(words)


def _given(settings: Options | Serving) -> dict[str, Any]:
    """The fields whose value is not the default."""
    defaults = {field.name: field.default for field in fields(settings)}
    return {name: value for name, value in asdict(settings).items() if value != defaults[name]}
