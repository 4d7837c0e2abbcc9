"""Checks that a comparison with plain decoding is not empty: drafts are accepted, widths and
recordings are used, recurrent states are the same."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import requests
import torch

from sglang_dflash.tools.bench.server import Server
from tests.engine import checkpoints, workload
from tests.engine.hybrid import BLOCK_SIZE
from tests.engine.servers import GRAPHS, ServerConfig, shown_states
from tests.engine.session import ServerSession


class Seen(NamedTuple):
    """A server after a comparison.

    Attributes:
        config, plain: the server's and the plain one's.
        ours, theirs: their answers.
        server: running.
    """

    config: ServerConfig
    plain: ServerConfig
    ours: Any
    theirs: Any
    server: Server
    servers: ServerSession

    @property
    def report(self) -> dict[str, Any]:
        return self.server.dflash()


Check = Callable[[Seen], None]


def answers_of(asked: Any) -> list[dict[str, Any]]:
    """All answers, of every kind."""
    kinds = [asked] if isinstance(asked, list) else asked.values()
    return [answer for kind in kinds for answer in kind]


def _answers(seen: Seen) -> list[dict[str, Any]]:
    return answers_of(seen.ours)


def drafted(seen: Seen) -> None:
    """Our worker has drafted. A drafter that is never right would pass the comparison, too."""
    assert seen.report["worker"] == "sglang_dflash.serving.step.worker.DFlashWorker"
    found = [answer["meta_info"].get("spec_num_correct_drafts", 0) for answer in _answers(seen)]
    assert max(found) > 2


def unrepaired(seen: Seen) -> None:
    """The server runs without the repairs, which would show what they contain."""
    state = requests.get(f"{seen.server.url}/server_info").json()["internal_states"][0]
    assert "containment" not in state and "dflash" in state


def pictures_change_answers(seen: Seen) -> None:
    """A text with one picture, and with another one."""
    assert seen.ours[5]["output_ids"] != seen.ours[12]["output_ids"]


def undrafted(seen: Seen) -> None:
    """Requests under a grammar took one token per step."""
    assert seen.report["undrafted_steps"] > 100


def known_text_drafted(seen: Seen) -> None:
    drafted(seen)
    if "demo" in seen.ours:
        assert workload.acceptance_length(seen.ours["demo"]) > 2


def both_sources(seen: Seen, least: int = 10) -> None:
    """Drafts from either source are taken and accepted, more than `least` of each."""
    for counts in (seen.report["steps_by_source"], seen.report["accepted_drafts_by_source"]):
        assert min(counts.values()) > least, counts


def looked_up(seen: Seen) -> None:
    """Lookup's are accepted also where the draft fills nothing; if widths are drawn, too few steps
    reach that far to count on one."""
    both_sources(seen)
    beyond = seen.report["acceptance_by_position"][seen.report["trained_block_size"] - 1 :]
    assert not beyond or any(beyond), beyond


def two_pools(seen: Seen) -> None:
    """The sliding layers' is a quarter of the other, and more tokens were kept than it has."""
    known_text_drafted(seen)
    all_layers, sliding = 12000, 3000
    load = requests.get(f"{seen.server.url}/server_info").json()["internal_states"][0]
    assert load["memory_usage"]["token_capacity"] == all_layers, load["memory_usage"]
    assert sum(answer["meta_info"]["prompt_tokens"] for answer in _answers(seen)) > sliding


def used_every_width(seen: Seen, steps: int = 20) -> None:
    assert all(used > steps for used in seen.report["width_steps"].values())


def drafted_at_every_width(first: float, steps: int = 20) -> Check:
    """Every width has drafted, and more than `first` of the first drafts were accepted: an answer's
    acceptance length would depend on how many of its steps were drawn as plain."""

    def check(seen: Seen) -> None:
        used_every_width(seen, steps)
        assert seen.report["acceptance_by_position"][0] > first
        assert seen.report["nonfinite_outputs"] == 0

    return check


def choices_shown(seen: Seen) -> None:
    """An adaptive server shows the widths that it chose, in its metrics, too."""
    report = seen.report
    assert report["width"] == "adaptive" and all(report["width_steps"].values())
    assert sum(report["width_steps"].values()) == report["decode_steps"]
    assert report["width_costs"]
    metrics = requests.get(f"{seen.server.url}/metrics", timeout=60).text
    counted = re.findall(r'sglang_dflash_steps_total\{.*width="(\d+)".*\} ([\d.]+)', metrics)
    assert {width: float(n) for width, n in counted} == report["width_steps"]


def sampled(length: float) -> Check:
    """Every answer draws its own tokens, and drafts of them are accepted."""

    def check(seen: Seen) -> None:
        assert len({tuple(answer["output_ids"]) for answer in seen.ours}) == len(seen.ours)
        assert workload.acceptance_length(seen.ours) > length

    return check


def thought_in_bounds(seen: Seen) -> None:
    """The thought ends where it may not go on: earlier with a smaller budget."""
    end = next(token for token, text in checkpoints.THOUGHTS.items() if text == "</think>")
    lengths = [answer["output_ids"].index(end) for answer in seen.ours[:14]]
    assert lengths[::2] == lengths[1::2]
    budgets = (0, 1, 3, 7, 8, 9, 20)
    assert all(length <= budget for length, budget in zip(lengths[::2], budgets, strict=True))
    assert lengths[:2] == [0, 0] and len(set(lengths)) > 3


def ended_alike(seen: Seen) -> None:
    """Answers end for the same reason, with the same text and log-probabilities; many end early."""
    for got, expected in zip(seen.ours, seen.theirs, strict=True):
        assert got["text"] == expected["text"]
        ours, theirs = (answer["meta_info"] for answer in (got, expected))
        assert ours["finish_reason"] == theirs["finish_reason"]
        assert ours["completion_tokens"] == theirs["completion_tokens"]
        ours, theirs = (info["output_token_logprobs"] for info in (ours, theirs))
        assert [one[1] for one in ours] == [one[1] for one in theirs]
        torch.testing.assert_close(
            *(torch.tensor([one[0] for one in every]) for every in (ours, theirs)),
            atol=1e-4, rtol=0,
        )  # fmt: skip
    types = [answer["meta_info"]["finish_reason"]["type"] for answer in seen.ours]
    assert types.count("stop") > len(types) / 2


def likelihoods_to_the_bit(seen: Seen) -> None:
    """Log-probabilities of plain decoding's, beside others as alone, with drafts as without."""
    half = len(seen.ours) // 2
    for ours, theirs in (
        (seen.ours, seen.theirs),
        (seen.ours[:half], seen.ours[half:]),
        (seen.theirs[:half], seen.theirs[half:]),
    ):
        for got, expected in zip(ours, theirs, strict=True):
            for key in ("output_token_logprobs", "output_top_logprobs"):
                assert got["meta_info"][key] == expected["meta_info"][key], key


def scored_alike(seen: Seen) -> None:
    """Requests for no token: with plain decoding's log-probabilities, and the same ones beside
    others as alone."""
    keys = [
        f"{of}_{what}_logprobs"
        for of in ("input", "output")
        for what in ("token", "top", "token_ids")
    ]
    alone, beside = (slice(6), slice(6, 18))
    for got, expected in (
        (seen.ours, seen.theirs),
        (seen.theirs[beside], 2 * seen.theirs[alone]),
    ):
        for ours, theirs in zip(got, expected, strict=True):
            for key in keys:
                pair = [_every_number(one["meta_info"].get(key)) for one in (ours, theirs)]
                assert pair[0] == pytest.approx(pair[1], abs=1e-4), key
    assert len(seen.ours[5]["meta_info"]["input_token_ids_logprobs"]) == 2
    assert not seen.ours[0]["meta_info"]["output_token_logprobs"]


def _every_number(value: Any) -> list[float]:
    """All numbers of nested lists, in their order."""
    if isinstance(value, list):
        return [number for one in value for number in _every_number(one)]
    return [] if value is None else [value]


def hidden_states_alike(seen: Seen) -> None:
    """Hidden states are equal: the prompt's last chunk, then a row per token of the answer but the
    last. A request that was retracted begins again with a prefill of all."""
    for got, expected in zip(seen.ours, seen.theirs, strict=True):
        states, info = got["meta_info"]["hidden_states"], got["meta_info"]
        if not info["num_retractions"]:
            assert len(_rows(states[1:])) == info["completion_tokens"] - 1
        prefills = [i for i, one in enumerate(states) if isinstance(one[0], list) and len(one) > 1]
        last = prefills[-1] if prefills else 0
        ours, theirs = _rows(states[last:]), _rows(expected["meta_info"]["hidden_states"])
        both = min(len(ours), len(theirs))
        torch.testing.assert_close(ours[-both:], theirs[-both:], atol=1e-5, rtol=1e-5)
        assert both > 20


def _rows(states: list[Any]) -> torch.Tensor:
    """`[N, E]`: an entry is a row, or the rows of a prefill."""
    several = [one if isinstance(one[0], list) else [one] for one in states]
    return torch.tensor([row for rows in several for row in rows])


def masks_alike(seen: Seen) -> None:
    """The same tokens to draw from, with the same probabilities."""
    for got, expected in zip(seen.ours, seen.theirs, strict=True):
        ours, theirs = (answer["meta_info"] for answer in (got, expected))
        masks = ours["output_token_sampling_mask"]
        assert [set(mask) for mask in masks] == [
            set(mask) for mask in theirs["output_token_sampling_mask"]
        ]
        assert len(masks) == ours["completion_tokens"]
        flat = [_numbers(info["output_token_sampling_logprobs"]) for info in (ours, theirs)]
        torch.testing.assert_close(*flat, atol=1e-4, rtol=0)
    assert max(len(mask) for mask in seen.ours[1]["meta_info"]["output_token_sampling_mask"]) > 2


def _numbers(entries: list[Any]) -> torch.Tensor:
    """A number per token, or a list in any order."""
    lists = [sorted(one) if isinstance(one, list) else [one] for one in entries]
    return torch.tensor([number for one in lists for number in one])


def cached_tokens(answers: list[dict[str, Any]]) -> list[int]:
    return [answer["meta_info"]["cached_tokens"] for answer in answers]


def prefix_found(seen: Seen) -> None:
    """Shared prefixes are cached. Pages of 16 round their lengths; the plain server's are of 1."""
    if "shared prefix" in seen.ours:
        both = seen.ours["shared prefix"], seen.theirs["shared prefix"]
        got, expected = map(cached_tokens, both)
        assert got == expected or "--page-size" in seen.config.flags
        # All but the first of each prefix.
        assert sum(cached > 200 for cached in got) == len(got) - 3


def history_found(seen: Seen) -> None:
    """A chat's history is cached. One more token is an answer's last one: the verify step has
    computed its KV, a plain step has not."""
    for kind, got in seen.ours.items():
        pairs = zip(cached_tokens(got), cached_tokens(seen.theirs[kind]), strict=True)
        assert {ours - plain for ours, plain in pairs} <= {0, 1}
    assert sum(cached_tokens(seen.ours["chats"])) > 4_000


def retracted(seen: Seen) -> None:
    assert sum(answer["meta_info"]["num_retractions"] for answer in _answers(seen)) > 0
    assert seen.report["draft_kv_entries"] == 150


def replayed(seen: Seen) -> None:
    """Draft steps came from recordings of the sizes asked for; batches of 7 and 8 exceed the
    largest of GRAPHS."""
    report = seen.report
    assert report["draft_graph_proposals"] > 30 and report["draft_graph_commits"] > 30
    asked = [int(size) for size in seen.config.extra_args[1:]]
    sizes = asked or list(range(1, 9))
    assert report["draft_graph_batch_sizes"] == sizes
    assert (report["draft_eager_proposals"] > 0) == (seen.config == GRAPHS)


def proposals_from_graphs(seen: Seen) -> None:
    """Proposals come from graphs up to the batch size that the server records; larger batches, if
    it runs any, have none."""
    report, flags = seen.report, seen.config.flags
    largest = int(flags["--cuda-graph-max-bs-decode"])
    sizes = report["draft_graph_batch_sizes"]
    assert (sizes[0], sizes[-1]) == (1, largest)
    assert report["draft_graph_proposals"] > 10
    runs_larger = int(flags["--max-running-requests"]) > largest
    assert (report["draft_eager_proposals"] > 0) == runs_larger


def whole_context(seen: Seen) -> None:
    """Every request has reached the end of the context."""
    infos = [answer["meta_info"] for answer in seen.ours]
    lengths = {info["prompt_tokens"] + info["completion_tokens"] for info in infos}
    assert lengths == {workload.CONTEXT - 2}


def two_ranks(seen: Seen) -> None:
    assert seen.report["tensor_parallel"] == 2


def two_replicas(seen: Seen) -> None:
    info = requests.get(f"{seen.server.url}/server_info", timeout=60).json()
    reports = [state["dflash"] for state in info["internal_states"]]
    assert len(reports) == 2
    assert all(one["verify_steps"] > 0 and one["acceptance_length"] > 1.5 for one in reports)


def rolls_back_by(how: str | None) -> Check:
    """A rollback by its name; None if the target has no recurrent layers."""

    def check(seen: Seen) -> None:
        assert seen.report["recurrent_rollback"] == how

    return check


def lengths_mixed(seen: Seen) -> None:
    """The oracle's drafts made everything occur: all lengths, and batches that mix no, some and all
    drafts accepted."""
    path = seen.servers.path(shown_states(seen.config)) / "accepted.jsonl"
    steps = [set(json.loads(line)) for line in path.read_text().splitlines()]
    assert set.union(*steps) == set(range(1, BLOCK_SIZE + 1))
    assert sum(1 in step and BLOCK_SIZE in step and len(step) > 2 for step in steps) >= 5
    assert any(step == {1} for step in steps) and any(step == {BLOCK_SIZE} for step in steps)


def states_found(kept: str) -> Check:
    """Cached tokens of every prompt and turn are those of plain decoding that keeps its states in
    the same way."""

    def check(seen: Seen) -> None:
        got, expected = (
            cached_tokens(every["prompts"] + every["chats"]) for every in (seen.ours, seen.theirs)
        )
        pairs = list(zip(got, expected, strict=True))
        assert sum(plain > 0 for plain in expected) >= (6 if kept == "no-buffer" else 6 + 9)
        if kept == "no-buffer":
            # The state at the end of a request is kept, one token further: the target has computed
            # the last output token by then.
            assert all(ours in (plain, plain + 1) for ours, plain in pairs)
        elif kept == "lazy":
            # SGLang does not hand over the state of a boundary that a request's last verify step
            # crosses or could have crossed.
            assert all(ours <= plain for ours, plain in pairs)
            assert sum(ours == plain for ours, plain in pairs) >= 0.9 * len(pairs)
        else:
            assert got == expected

    return check


def same_states(seen: Seen) -> None:
    """A request's states are the same (the first rank's) at every length at which both servers had
    a step."""
    ours, plain = (
        {path.name: path for path in seen.servers.path(shown_states(config)).glob("*.pt")}
        for config in (seen.config, seen.plain)
    )
    both = sorted(set(ours) & set(plain))
    # 40 prompts and 12 turns of 40 new tokens, at four or five tokens a step.
    assert len({file.split("-")[0] for file in both}) >= 50 and len(both) >= 300
    # The first rank's heads come first; of the convolution it has parts of three, which the outputs
    # test.
    parts = ("temporal",) if "--tp-size" in seen.config.flags else ("temporal", "conv")
    for file in both:
        got, expected = torch.load(ours[file]), torch.load(plain[file])
        for part in parts:
            expected[part] = expected[part][:, : got[part].shape[1]]
            # A block's products are rounded otherwise than a single token's: errors are relative to
            # the largest entry.
            scale = max(1.0, float(expected[part].abs().max()))
            off = float((got[part] - expected[part]).abs().max())
            assert off <= 1e-5 * scale, (
                f"{file}: {part} is off by {off:.1e}, its largest entry is {scale:.1f}"
            )
        ours[file].unlink()
