"""Targets with recurrent layers: outputs are plain decoding's whatever is accepted, with replay and
with snapshots."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
import torch

from sglang_dflash.bench.server import Server, ServerFailed
from tests.engine.hybrid_requests import (
    BLOCK_SIZE,
    FEW,
    Answers,
    cached,
    few_answers,
    hybrid_answers,
    outputs,
)
from tests.engine.servers import (
    HYBRID_BROKEN,
    HYBRID_DFLASH,
    HYBRID_LAZY_NO_OVERLAP,
    HYBRID_MOE_DFLASH,
    HYBRID_MOE_PLAIN,
    HYBRID_PLAIN,
    HYBRID_PLAIN_NO_BUFFER,
    HYBRID_ROLLBACK,
    HYBRID_TP2,
    ServerConfig,
    shown_states,
)
from tests.engine.session import ServerSession

# Logits by which the likeliest token leads everywhere. Between a block and single tokens rounding
# moves a logit by up to 3e-5, at worst the best and the second in opposite directions; how far
# depends on the machine and the batch, which closer decisions would test.
CLEAR = 6e-5


@pytest.mark.parametrize("config", [HYBRID_PLAIN, HYBRID_MOE_PLAIN], ids=str)
def test_plain_decoding_is_that_of_transformers(
    config: ServerConfig, answers: Any, servers: ServerSession
) -> None:
    """The CPU platform's own layers, dense and with experts: every token is the one that
    Transformers finds likeliest, by a clear lead."""
    from transformers import AutoModelForCausalLM

    checkpoint = servers.path(dict(config.flags)["--model-path"])
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    for prompt, answer in itertools.chain(*answers(config, hybrid_answers)):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + answer["output_ids"]])).logits
        logits = logits[0, len(prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == answer["output_ids"]
        best, second = logits.topk(2).values.unbind(-1)
        assert (best - second).min() > CLEAR


# Of each rollback some, so that every way of keeping states is there; the others take minutes more.
LONG = {
    ("replay", "extra-buffer-no-overlap"),
    ("snapshot", "extra-buffer"),
    ("snapshot", "no-buffer"),
}


def reference_of(kept: str) -> ServerConfig:
    """The plain server whose prefix cache keeps states as often."""
    return HYBRID_PLAIN_NO_BUFFER if kept == "no-buffer" else HYBRID_PLAIN


@pytest.mark.recorded(HYBRID_PLAIN, hybrid_answers)
@pytest.mark.parametrize(
    ("config", "rollback", "kept"),
    [
        pytest.param(
            config,
            rollback,
            kept,
            id=f"{rollback}-{kept}",
            marks=[
                pytest.mark.recorded(reference_of(kept), hybrid_answers),
                *([pytest.mark.long] if (rollback, kept) in LONG else []),
            ],
        )
        for (rollback, kept), config in HYBRID_ROLLBACK.items()
    ],
)
def test_outputs_states_and_prefix_hits_are_those_of_plain_decoding(
    config: ServerConfig,
    rollback: str,
    kept: str,
    answers: Any,
    server: Server,
    servers: ServerSession,
) -> None:
    ours = answers(config, hybrid_answers)
    for got, expected in zip(ours, answers(HYBRID_PLAIN, hybrid_answers), strict=True):
        assert len(got) >= 18 and outputs(got) == outputs(expected)
    assert_hits(kept, ours, answers(reference_of(kept), hybrid_answers))
    assert server.dflash()["recurrent_rollback"] == rollback
    assert_mixed(servers, config)
    assert_same_states(servers, config)


@pytest.mark.recorded(HYBRID_PLAIN, hybrid_answers)
@pytest.mark.parametrize(
    ("config", "rollback"),
    [
        pytest.param(HYBRID_TP2["replay"], "replay", id="replay"),
        pytest.param(HYBRID_TP2["snapshot"], "snapshot", id="snapshot", marks=pytest.mark.long),
    ],
)
def test_two_ranks_with_half_the_heads_each(
    config: ServerConfig, rollback: str, answers: Any, server: Server, servers: ServerSession
) -> None:
    plain = answers(HYBRID_PLAIN, hybrid_answers)
    for got, expected in zip(answers(config, hybrid_answers), plain, strict=True):
        assert outputs(got) == outputs(expected) and cached(got) == cached(expected)
    report = server.dflash()
    assert (report["recurrent_rollback"], report["tensor_parallel"]) == (rollback, 2)
    assert_mixed(servers, config)
    # The first rank's heads come first; of the convolution it has parts of three, which the outputs
    # test.
    assert_same_states(servers, config, parts=("temporal",))


def assert_hits(kept: str, ours: tuple[Answers, Answers], plain: tuple[Answers, Answers]) -> None:
    """Compare cached tokens of every prompt and turn with plain decoding's, which keeps states in
    the same way."""
    pairs = list(zip(cached(ours[0] + ours[1]), cached(plain[0] + plain[1]), strict=True))
    assert sum(expected > 0 for _, expected in pairs) >= (12 if kept == "no-buffer" else 12 + 15)
    if kept == "no-buffer":
        # The state at the end of a request is kept, one token further: the target has computed the
        # last output token by then.
        assert all(got in (expected, expected + 1) for got, expected in pairs)
    elif kept == "lazy":
        # SGLang does not hand over the state of a boundary that a request's last verify step
        # crosses or could have crossed.
        assert all(got <= expected for got, expected in pairs)
        assert sum(got == expected for got, expected in pairs) >= 0.9 * len(pairs)
    else:
        assert all(got == expected for got, expected in pairs)


@pytest.mark.server(HYBRID_MOE_DFLASH)
@pytest.mark.recorded(HYBRID_MOE_PLAIN, hybrid_answers)
def test_experts(answers: Any, server: Server, servers: ServerSession) -> None:
    ours, plain = (
        answers(config, hybrid_answers) for config in (HYBRID_MOE_DFLASH, HYBRID_MOE_PLAIN)
    )
    for got, expected in zip(ours, plain, strict=True):
        assert outputs(got) == outputs(expected) and cached(got) == cached(expected)
    assert server.dflash()["recurrent_rollback"] == "replay"
    assert_mixed(servers, HYBRID_MOE_DFLASH)


def assert_mixed(servers: ServerSession, config: ServerConfig) -> None:
    """Check that the drafts made everything occur: all lengths, and batches that mix no, some and
    all drafts accepted."""
    lines = (servers.path(shown_states(config)) / "accepted.jsonl").read_text().splitlines()
    steps = [set(json.loads(line)) for line in lines]
    assert set.union(*steps) == set(range(1, BLOCK_SIZE + 1))
    assert sum(1 in step and BLOCK_SIZE in step and len(step) > 2 for step in steps) >= 5
    assert any(step == {1} for step in steps) and any(step == {BLOCK_SIZE} for step in steps)


def assert_same_states(
    servers: ServerSession,
    config: ServerConfig,
    parts: tuple[str, ...] = ("temporal", "conv"),
    requests: int = 80,
) -> None:
    """At every length of a request at which both servers had a step, its states are the same (the
    first rank's)."""
    ours, plain = (
        {path.name: path for path in servers.path(shown_states(c)).glob("*.pt")}
        for c in (config, HYBRID_PLAIN)
    )
    both = sorted(set(ours) & set(plain))
    # 64 prompts and 18 turns of 40 new tokens, at four or five tokens a step.
    assert len({file.split("-")[0] for file in both}) >= requests and len(both) >= 6 * requests
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


def test_no_buffer_under_overlap_is_refused(servers: ServerSession) -> None:
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.server_args import prepare_server_args

    config = HYBRID_DFLASH.having(mamba_scheduler_strategy="no_buffer")
    arguments = prepare_server_args(servers.arguments(config))
    with pytest.raises(
        AssertionError,
        match=r"no_buffer do not support overlap schedule\. Try to set disable_overlap_schedule",
    ):
        arguments.resolve_once()


def test_a_lazy_buffer_without_overlap_is_refused(servers: ServerSession) -> None:
    with pytest.raises(ServerFailed, match="Lazy extra buffer requires overlap schedule"):
        servers.server(HYBRID_LAZY_NO_OVERLAP)


@pytest.mark.server(HYBRID_BROKEN)
@pytest.mark.recorded(HYBRID_PLAIN, hybrid_answers)
def test_a_rollback_that_forgets_a_token_is_found(answers: Any, servers: ServerSession) -> None:
    """The comparisons above can fail: states that are one token behind show in both."""
    ours, plain = answers(HYBRID_BROKEN, few_answers), answers(HYBRID_PLAIN, hybrid_answers)
    assert outputs(ours) != outputs(plain[0][:FEW])
    with pytest.raises(AssertionError, match="is off by"):
        assert_same_states(servers, HYBRID_BROKEN, requests=FEW)
