"""Outputs are plain decoding's, token by token, in float32: which requests are compared on which
server, on one page.

A row of `TABLE` is a server, the plain one that it is compared with, what both are asked
(workload.py, feature_requests.py), and what the server must show besides
(checks.py). Elsewhere: what an answer must be, beyond plain decoding's (test_features.py), that
sampled requests without a seed follow the target's law (test_sampling.py), a while of mixed
traffic (test_soak.py).
"""

from __future__ import annotations

from typing import Any

import pytest

from sglang_dflash.tools.bench.server import Server
from tests.engine import admission, answer_ends, checks, front_ends, workload
from tests.engine import constrained as c
from tests.engine import feature_requests as features
from tests.engine import hierarchical as h
from tests.engine import servers as s
from tests.engine.comparison import Row, cases, compare
from tests.engine.servers import Ask, ServerConfig
from tests.engine.session import ServerSession

DEMO = (
    Row(
        s.DFLASH,
        s.PLAIN,
        (workload.run,),
        (checks.known_text_drafted, checks.prefix_found),
    ),
    Row(
        s.PAGE16_NO_OVERLAP,
        s.PLAIN,
        (workload.run_half,),
        (checks.known_text_drafted, checks.prefix_found, checks.looked_up),
    ),
    Row(
        s.PAGE16_WINDOW,
        s.PLAIN,
        (workload.run_half,),
        (checks.known_text_drafted, checks.prefix_found),
    ),
    # A pool and a draft KV cache that are too small, and requests retracted every 15 steps.
    Row(
        s.TIGHT,
        s.PLAIN,
        (workload.run_half, workload.penalised_together),
        (checks.retracted, checks.looked_up),
    ),
    # Draft steps replayed from recordings, as CUDA graphs are.
    Row(
        s.GRAPHS,
        s.PLAIN,
        (workload.run_half,),
        (checks.known_text_drafted, checks.replayed, checks.looked_up),
    ),
    Row(s.GRAPHS, s.PLAIN, (workload.hang_ups,)),
    # Every step has another width.
    Row(
        s.FEATURES_WIDTHS,
        s.PLAIN,
        (workload.run_half,),
        (checks.drafted_at_every_width(0.15), checks.both_sources),
    ),
    # And widths that are chosen by what pays, with chats on a draft KV cache of the default size.
    Row(s.ADAPTIVE, s.PLAIN, (workload.run_half,), (checks.choices_shown,)),
    Row(s.ADAPTIVE, s.PLAIN, (workload.chatted,), (checks.history_found,)),
    Row(s.DEVICE_LENGTHS, s.PLAIN, (workload.up_to_the_limit,), (checks.whole_context,)),
    # A target whose sliding layers have a smaller KV pool, against one pool for all layers.
    Row(s.SLIDING_PAGES_WINDOW, s.SLIDING_PLAIN, (workload.run_half,), (checks.two_pools,)),
    # Two ranks.
    Row(
        s.TP2_DISAGREEING,
        s.PLAIN,
        (workload.some_short_and_demo,),
        (checks.drafted, checks.two_ranks),
    ),
    Row(s.BUILTIN, s.PLAIN, (workload.some_short_and_demo,)),
    # Drafts of no use: their logits overflow.
    Row(s.OVERFLOWING, s.PLAIN, (workload.many_steps,)),
    # Chats whose history comes back from host memory.
    Row(h.HOST, s.PLAIN, (workload.chatted,), (checks.history_found, h.came_back)),
    *(
        Row(
            config,
            s.HYBRID_PAIR_PLAIN,
            (workload.chatted_hybrid,),
            (checks.rolls_back_by(rollback), h.came_back),
        )
        for rollback, config in h.HYBRID.items()
    ),
)
# Sampled: the accept rule keeps a draft if and only if the target samples it at that position with
# the request's seed.
SAMPLED = (
    Row(
        s.SEEDED,
        s.SEEDED_PLAIN,
        (workload.seeded,),
        # Sampled answers hardly repeat themselves.
        (checks.drafted, checks.sampled(1.3), lambda seen: checks.both_sources(seen, least=0)),
    ),
    Row(s.SEEDED_PLAIN, s.SEEDED_PLAIN, (workload.seeded_alone,)),
)
# Everything that a request can ask for. The plain server runs without overlap scheduling: with it,
# custom processors see output tokens a step late. Where the two kinds of scheduling differ, both
# are asked.
SCHEDULED = (features.grammars, features.sessions, features.mixed_chunks, features.penalties)
PENALISED = (workload.alone, workload.joining)
FEATURES = (
    Row(s.FEATURES_PLAIN, s.FEATURES_PLAIN, (workload.joining,)),
    Row(s.PLAIN, s.FEATURES_PLAIN, (workload.joining,)),
    Row(
        s.FEATURES_DFLASH,
        s.FEATURES_PLAIN,
        (
            *SCHEDULED,
            features.choices,
            features.logprobs,
            features.biases,
            features.earliest_stops,
            features.limits,
            features.processors,
            features.priorities,
            admission.admitted,
            features.adapters,
            *PENALISED,
        ),
        (checks.drafted,),
        long=(workload.alone,),
    ),
    Row(
        s.FEATURES_DFLASH_NO_OVERLAP,
        s.FEATURES_PLAIN,
        (*SCHEDULED, *PENALISED),
        (checks.drafted,),
        long=(features.grammars, features.penalties, workload.alone),
    ),
    Row(
        s.FEATURES_WIDTHS,
        s.FEATURES_PLAIN,
        (*SCHEDULED, features.logprobs, features.limits, features.processors),
        # Grammars alone need few steps: what they allow, lookup often finds.
        (lambda seen: checks.used_every_width(seen, steps=5),),
    ),
)
# Without the repairs, compared with plain servers that have them: SGLang applies penalties in the
# order of a set, which differs between processes; its seeded samples depend on the batch, and one
# with min-p ends the server.
UNREPAIRED = (checks.drafted, checks.unrepaired)
WORKER_ONLY = (
    Row(s.WORKER_ONLY, s.FEATURES_PLAIN, (features.penalties, workload.joining), UNREPAIRED),
    Row(s.WORKER_ONLY, s.SEEDED_PLAIN, (workload.seeded,), UNREPAIRED),
)
# Scores, and nothing else; of prompts that are not prefilled in chunks (docs/upstream.md).
SCORES = (Row(s.DFLASH, s.PLAIN, (features.scores,), (checks.scored_alike,)),)
# In float32, on a CPU, a row has the same bits whatever rows are beside it.
LIKELIHOODS = (Row(s.DFLASH, s.PLAIN, (features.likelihoods,), (checks.likelihoods_to_the_bit,)),)
# Budgets of a model that thinks.
THINKING = (
    Row(c.THINKING_PLAIN, c.THINKING_PLAIN, (c.thoughts,), (checks.thought_in_bounds,)),
    Row(c.THINKING, c.THINKING_PLAIN, (c.thoughts,), (checks.drafted,)),
)
# Answers that end inside a block, for the earlier of two reasons.
ENDS = (
    Row(s.FEATURES_DFLASH, s.FEATURES_PLAIN, (answer_ends.ends,), (checks.ended_alike,)),
    Row(
        s.FEATURES_DFLASH_NO_OVERLAP,
        s.FEATURES_PLAIN,
        (answer_ends.ends_once,),
        (checks.ended_alike,),
    ),
    Row(s.ADAPTIVE, s.FEATURES_PLAIN, (answer_ends.ends_once,), (checks.ended_alike,)),
    Row(
        s.HYBRID_PAIR_WIDTHS,
        s.HYBRID_PAIR_PLAIN,
        (answer_ends.ends_hybrid,),
        (checks.ended_alike,),
    ),
    Row(s.SEEDED, s.SEEDED_PLAIN, (answer_ends.ends_seeded,), (checks.ended_alike,)),
)
# What is returned besides tokens.
RETURNED = (
    *(
        Row(config, s.FEATURES_PLAIN, (features.hidden_states,), (checks.hidden_states_alike,))
        for config in (s.FEATURES_DFLASH, s.FEATURES_DFLASH_NO_OVERLAP, s.FEATURES_WIDTHS)
    ),
    Row(
        s.TIGHT,
        s.FEATURES_PLAIN,
        (features.hidden_states,),
        (checks.hidden_states_alike, checks.retracted),
    ),
    Row(s.SEEDED, s.SEEDED_PLAIN, (features.sampling_masks,), (checks.masks_alike,)),
)
# Targets with recurrent layers: the demo pair, whose target has got a vision tower, then random
# targets with drafts of an oracle, so that everything from none to all of a block is accepted.
# Every way of keeping states is in the ordinary tier with one rollback; the default one with two
# ranks, with experts and with widths.
ORDINARY_STATES = {
    ("replay", "lazy"),
    ("replay", "no-buffer"),
    ("snapshot", "extra-buffer-no-overlap"),
}
HYBRID = (
    Row(
        s.HYBRID_PAIR_GRAPHS,
        s.HYBRID_PAIR_PLAIN,
        (workload.run_pair, workload.pictures),
        (checks.drafted, checks.rolls_back_by("snapshot"), checks.replayed),
    ),
    Row(
        s.HYBRID_PAIR_WIDTHS,
        s.HYBRID_PAIR_PLAIN,
        (workload.run_pair,),
        (checks.drafted_at_every_width(0.5, steps=10), checks.rolls_back_by("replay")),
    ),
    Row(
        s.HYBRID_PAIR_WIDTHS,
        s.HYBRID_PAIR_PLAIN,
        (workload.pictures,),
        (checks.drafted, checks.pictures_change_answers),
    ),
    *(
        Row(
            config,
            s.HYBRID_PLAIN_NO_BUFFER if kept == "no-buffer" else s.HYBRID_PLAIN,
            (workload.hybrid_answers,),
            (
                checks.rolls_back_by(rollback),
                checks.states_found(kept),
                checks.lengths_mixed,
                checks.same_states,
            ),
            long=() if (rollback, kept) in ORDINARY_STATES else (workload.hybrid_answers,),
        )
        for (rollback, kept), config in s.HYBRID_ROLLBACK.items()
    ),
    *(
        Row(
            config,
            s.HYBRID_PLAIN,
            (workload.hybrid_answers,),
            (
                checks.rolls_back_by(rollback),
                checks.states_found("extra-buffer"),
                checks.two_ranks,
                checks.lengths_mixed,
                checks.same_states,
            ),
            long=(workload.hybrid_answers,) if rollback == "snapshot" else (),
        )
        for rollback, config in s.HYBRID_TP2.items()
    ),
    *(
        Row(
            config,
            s.HYBRID_PLAIN,
            (workload.hybrid_answers,),
            (checks.used_every_width, checks.states_found(kept), checks.same_states),
            long=(workload.hybrid_answers,) if kept == "lazy" else (),
        )
        for kept, config in s.HYBRID_WIDTHS.items()
    ),
    *(
        Row(
            config,
            plain,
            (workload.hybrid_answers,),
            (
                checks.rolls_back_by("replay"),
                checks.states_found("extra-buffer"),
                checks.lengths_mixed,
            ),
        )
        for config, plain in (
            (s.HYBRID_MOE_DFLASH, s.HYBRID_MOE_PLAIN),
            (s.HYBRID_NEXT_DFLASH, s.HYBRID_NEXT_PLAIN),
        )
    ),
)
# Every front end, streamed and not.
TOLD = tuple(
    Row(front_ends.TOLD, front_ends.TOLD_PLAIN, (ask,), checks)
    for ask, checks in (
        (front_ends.chat, (front_ends.calls_told, front_ends.in_blocks)),
        (front_ends.messages, (front_ends.calls_told,)),
        (front_ends.responses, (front_ends.calls_told,)),
        *((ask, ()) for ask in front_ends.COMPARED_ONLY),
    )
)
# Only in the tier `long`: what rows above cover but for one setting.
RARE = (
    Row(
        s.RANDOM_WIDTHS_TP2,
        s.PLAIN,
        (workload.run_half,),
        (checks.drafted_at_every_width(0.15), checks.both_sources),
    ),
    Row(s.SLIDING, s.SLIDING_PLAIN, (workload.run_half,), (checks.two_pools,)),
    Row(s.DP2, s.PLAIN, (workload.some_short_and_demo,), (checks.two_replicas,)),
    Row(s.FEATURES_OVERLAPPED, s.FEATURES_PLAIN, PENALISED),
    # A hierarchical cache without a draft, and in pages.
    Row(h.HOST_PLAIN, s.PLAIN, (workload.chatted,), (checks.history_found,)),
    Row(h.HYBRID_PLAIN, s.HYBRID_PAIR_PLAIN, (workload.chatted_hybrid,)),
    Row(h.HOST_PAGES, s.PLAIN, (workload.chatted,), (h.came_back,)),
    # Sampled: prompts in chunks, two ranks, other pairs.
    *(
        Row(
            config, s.SEEDED_PLAIN, (workload.seeded,), (checks.drafted, checks.sampled(1.3), *more)
        )
        for config, more in ((s.SEEDED_CHUNKS, ()), (s.SEEDED_TP2, (checks.two_ranks,)))
    ),
    Row(
        s.SEEDED_HYBRID,
        s.SEEDED_HYBRID_PLAIN,
        (workload.seeded_hybrid,),
        (checks.drafted, checks.sampled(1.3)),
    ),
    # Grammars of other backends than XGrammar.
    Row(c.OWN, s.FEATURES_PLAIN, (features.grammars,), (checks.drafted, checks.undrafted)),
    Row(c.OUTLINES, c.OUTLINES_PLAIN, (c.regular,), (checks.drafted, checks.undrafted)),
    Row(c.GUIDANCE, c.GUIDANCE_PLAIN, (features.grammars,), (checks.drafted,)),
)
TABLE = (
    *DEMO, *SAMPLED, *FEATURES, *WORKER_ONLY, *SCORES, *LIKELIHOODS, *THINKING, *ENDS, *RETURNED,
    *HYBRID, *TOLD,
    *(row._replace(long=row.asked) for row in RARE),
)  # fmt: skip


@pytest.mark.parametrize(("config", "row", "ask"), cases(TABLE))
def test_answers_are_plain_decodings(
    config: ServerConfig, row: Row, ask: Ask, answers: Any, server: Server, servers: ServerSession
) -> None:
    compare(row, ask, answers, server, servers)


@pytest.mark.server(s.TP2_DISAGREEING)
@pytest.mark.recorded(s.DFLASH, workload.run)
def test_ranks_that_disagree_draft_as_one(answers: Any) -> None:
    """Every step of every request commits as much, but for what quantization changes in the draft.
    A rank with other drafts or tokens would have other lengths than the first from then on."""
    ours = answers(s.TP2_DISAGREEING, workload.some_short_and_demo)
    one = workload.half_of_two(answers(s.DFLASH, workload.run))
    got, expected = (
        sum(answer["meta_info"]["spec_verify_ct"] for kind in every.values() for answer in kind)
        for every in (ours, one)
    )
    assert abs(got - expected) <= 0.05 * expected
