"""Targets with recurrent layers: outputs are plain decoding's whatever is accepted, by replay and by snapshots."""

from __future__ import annotations

import itertools
import json
import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from sglang_dflash.bench.server import Server, ServerFailed
from tests.engine.conftest import (
    CACHED,
    HYBRID,
    HYBRID_BASE,
    HYBRID_DFLASH,
    HYBRID_DRAFT,
    HYBRID_MOE,
    Running,
    oracle_of,
    shown_by,
)

NEW_TOKENS, BLOCK_SIZE = 40, 8
TURNS = 3
# Logits by which the likeliest token leads everywhere. Between a block and single tokens rounding moves a logit by up to 3e-5, the best
# and the second apart at worst; how far depends on the machine and the batch, of which a closer decision would be a test.
CLEAR = 6e-5


@pytest.fixture(scope="module")
def hybrid_pairs() -> None:
    """Random targets (their outputs are as good as any to be reproduced) and a random draft, with sliding layers as Qwen3.6-27B's has."""
    import torch

    from sglang_dflash.core.weights import save_model
    from tests.conftest import random_model, raw_config
    from tests.engine.hybrid import SHAPE, save_random_hybrid

    save_random_hybrid(HYBRID)
    save_random_hybrid(HYBRID_MOE, moe=True)
    raw = raw_config(
        hidden_size=SHAPE["hidden_size"], vocab_size=SHAPE["vocab_size"], num_target_layers=4, block_size=BLOCK_SIZE,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"], sliding_window=32,
        dflash_config={"mask_token_id": 1023, "target_layer_ids": [0, 1, 2]},
    )  # fmt: skip
    save_model(random_model(raw), raw, HYBRID_DRAFT, torch.float32)


def prompts() -> list[list[int]]:
    """64 prompts: short ones, ones around the 64-token chunk of prefill, long ones, and ones that share a prefix of 300 tokens.

    Of those seeds tried, here and for the chats, these make no two tokens equally likely: see CLEAR.
    """
    rng = random.Random(4)
    lengths = [1, 2, 5, 17, 40, 63, 64, 65, 127, 128, 129, 200, 255, 256, 257, 300] * 3
    alone = [[rng.randrange(1000) for _ in range(n)] for n in lengths]
    trunk = [rng.randrange(1000) for _ in range(300)]
    return alone + [trunk + [rng.randrange(1000) for _ in range(1 + i)] for i in range(16)]


Answers = list[tuple[list[int], dict[str, Any]]]


def ask(server: Server) -> tuple[Answers, Answers]:
    """(prompt, answer) of all prompts, eight at a time, the shared prefixes one after another; and of six chats of three turns."""

    def one(prompt: list[int]) -> tuple[list[int], dict[str, Any]]:
        return prompt, server.generate(
            prompt, temperature=0, max_new_tokens=NEW_TOKENS, ignore_eos=True
        )

    def chat(index: int) -> Answers:
        """Every turn comes back with the one before in front: its states were kept while that was being decoded."""
        rng, text, done = random.Random(50 + index), [], []
        for _ in range(TURNS):
            text = text + [rng.randrange(1000) for _ in range(30 + 7 * index)]
            done.append(one(text))
            text = text + done[-1][1]["output_ids"]
        return done

    every = prompts()
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(one, every[:-16])) + [one(prompt) for prompt in every[-16:]]
        return answers, [turn for turns in pool.map(chat, range(6)) for turn in turns]


def outputs(answers: Answers) -> list[list[int]]:
    return [answer["output_ids"] for _, answer in answers]


def cached(answers: Answers) -> list[int]:
    return [answer["meta_info"]["cached_tokens"] for _, answer in answers]


@pytest.fixture(scope="module")
def plain(running: Running, hybrid_pairs: None) -> Any:
    """Configuration without speculation -> its answers, asked for once and given to the drafts of the others."""
    known: dict[str, tuple[Answers, Answers]] = {}

    def of(name: str) -> tuple[Answers, Answers]:
        if name not in known:
            known[name] = ask(running.get(name))
            oracle_of(name).write_text(
                json.dumps([[p, a["output_ids"]] for p, a in known[name][0] + known[name][1]])
            )
        return known[name]

    return of


@pytest.mark.parametrize("name", ["hybrid-plain", "hybrid-moe-plain"])
def test_plain_decoding_is_that_of_transformers(name: str, plain: Any) -> None:
    """The CPU platform's own layers, dense and with experts: every token is the one that Transformers finds likeliest, clearly."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        HYBRID_MOE if "moe" in name else HYBRID, dtype=torch.float32
    )
    for prompt, answer in itertools.chain(*plain(name)):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + answer["output_ids"]])).logits[
                0, len(prompt) - 1 : -1
            ]
        assert logits.argmax(-1).tolist() == answer["output_ids"]
        best, second = logits.topk(2).values.unbind(-1)
        assert (best - second).min() > CLEAR


@pytest.mark.parametrize("kept", CACHED)
@pytest.mark.parametrize("rollback", ["replay", "snapshot"])
def test_outputs_states_and_prefix_hits_are_those_of_plain_decoding(
    rollback: str, kept: str, plain: Any, running: Running
) -> None:
    name, reference = f"hybrid-{rollback}-{kept}", plain("hybrid-plain")
    answers = ask(running.get(name))
    for ours, theirs in zip(answers, reference, strict=True):
        assert len(ours) >= 18 and outputs(ours) == outputs(theirs)
    assert_hits(kept, cached(answers[0]) + cached(answers[1]), plain)
    assert running.get(name).dflash()["recurrent_rollback"] == rollback
    assert_mixed(name)
    assert_same_states(name)


@pytest.mark.parametrize("rollback", ["replay", "snapshot"])
def test_two_ranks_with_half_the_heads_each(rollback: str, plain: Any, running: Running) -> None:
    name, reference = f"hybrid-{rollback}-tp2", plain("hybrid-plain")
    answers = ask(running.get(name))
    for ours, theirs in zip(answers, reference, strict=True):
        assert outputs(ours) == outputs(theirs) and cached(ours) == cached(theirs)
    report = running.get(name).dflash()
    assert (report["recurrent_rollback"], report["tensor_parallel"]) == (rollback, 2)
    assert_mixed(name)
    # The first rank's heads come first; of the convolution it has parts of three, which the outputs speak for.
    assert_same_states(name, parts=("temporal",))


def assert_hits(kept: str, ours: list[int], plain: Any) -> None:
    """Cached tokens of every prompt and turn, against plain decoding with the same way of keeping states."""
    of_plain = plain("hybrid-plain-no-buffer" if kept == "no-buffer" else "hybrid-plain")
    pairs = list(zip(ours, cached(of_plain[0]) + cached(of_plain[1]), strict=True))
    assert sum(theirs > 0 for _, theirs in pairs) >= (12 if kept == "no-buffer" else 12 + 15)
    if kept == "no-buffer":
        # A state is kept where a request ended, one token further: the last output token has been through the target by then.
        assert all(mine in (theirs, theirs + 1) for mine, theirs in pairs)
    elif kept == "lazy":
        # SGLang does not hand over the state of a boundary that a request's last verify step crosses or could have crossed.
        assert all(mine <= theirs for mine, theirs in pairs) and sum(
            mine == theirs for mine, theirs in pairs
        ) >= 0.9 * len(pairs)
    else:
        assert all(mine == theirs for mine, theirs in pairs)


def test_experts(plain: Any, running: Running) -> None:
    reference = plain("hybrid-moe-plain")
    answers = ask(running.get("hybrid-moe-auto"))
    for ours, theirs in zip(answers, reference, strict=True):
        assert outputs(ours) == outputs(theirs) and cached(ours) == cached(theirs)
    assert running.get("hybrid-moe-auto").dflash()["recurrent_rollback"] == "replay"
    assert_mixed("hybrid-moe-auto")


def assert_mixed(name: str) -> None:
    """The drafts were such that everything occurred: all lengths, and batches with none, some and all accepted side by side."""
    steps = [
        set(json.loads(line))
        for line in (shown_by(name) / "accepted.jsonl").read_text().splitlines()
    ]
    assert set.union(*steps) == set(range(1, BLOCK_SIZE + 1))
    assert sum(1 in step and BLOCK_SIZE in step and len(step) > 2 for step in steps) >= 5
    assert any(step == {1} for step in steps) and any(step == {BLOCK_SIZE} for step in steps)


def assert_same_states(
    name: str, parts: tuple[str, ...] = ("temporal", "conv"), requests: int = 80
) -> None:
    """Wherever both servers stood at the same length of the same request, its slot held the same state (the first rank's)."""
    import torch

    ours, plain = (
        {path.name: path for path in shown_by(n).glob("*.pt")} for n in (name, "hybrid-plain")
    )
    both = sorted(set(ours) & set(plain))
    # 64 prompts and 18 turns of 40 new tokens, at four or five tokens a step.
    assert len({file.split("-")[0] for file in both}) >= requests and len(both) >= 6 * requests
    for file in both:
        got, expected = torch.load(ours[file]), torch.load(plain[file])
        for part in parts:
            expected[part] = expected[part][:, : got[part].shape[1]]
            # A block's products are rounded otherwise than a single token's: large entries are compared by the largest.
            scale = max(1.0, float(expected[part].abs().max()))
            off = float((got[part] - expected[part]).abs().max())
            assert off <= 1e-5 * scale, (
                f"{file}: {part} is off by {off:.1e}, its largest entry is {scale:.1f}"
            )
        ours[file].unlink()


def test_no_buffer_under_overlap_is_refused(hybrid_pairs: None) -> None:
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.server_args import prepare_server_args

    arguments = prepare_server_args(
        [*HYBRID_BASE, str(HYBRID), *HYBRID_DFLASH, "--mamba-scheduler-strategy", "no_buffer"]
    )
    with pytest.raises(
        AssertionError,
        match=r"no_buffer do not support overlap schedule\. Try to set disable_overlap_schedule",
    ):
        arguments.resolve_once()


def test_a_lazy_buffer_without_overlap_is_refused(running: Running, hybrid_pairs: None) -> None:
    with pytest.raises(ServerFailed, match="Lazy extra buffer requires overlap schedule"):
        running.get("hybrid-lazy-no-overlap")


def test_a_rollback_that_forgets_a_token_is_found(plain: Any, running: Running) -> None:
    """The comparisons above are worth something: a state that stays behind by one token shows in outputs and states."""
    reference = plain("hybrid-plain")
    name = "hybrid-broken"
    answers = ask(running.get(name))
    assert outputs(answers[0]) != outputs(reference[0])
    with pytest.raises(AssertionError, match="is off by"):
        # Where an answer differs, the chat's next turn is another request: no more than the 64 prompts and 6 first turns are sure.
        assert_same_states(name, requests=70)
