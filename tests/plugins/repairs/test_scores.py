"""Log-probabilities of a request for no token, in a prefill with one for tokens."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from sglang_dflash.plugins.repairs.scores import drop_output_logprobs
from tests.patches.originals import original

ADD = (
    "sglang.srt.managers.scheduler_components.logprob_result_processor"
    ".SchedulerLogprobResultProcessor.add_logprob_return_values"
)


def request_of(tokens: int) -> Any:
    empty: dict[str, Any] = {
        f"{of}_{kind}_{what}": [] if of == "output" else None
        for of in ("input", "output")
        for kind in ("token_logprobs", "top_logprobs", "token_ids_logprobs")
        for what in ("val", "idx")
    }
    logprob = SimpleNamespace(**empty, top_logprobs_num=1, token_ids_logprob=[3])
    params = SimpleNamespace(max_new_tokens=tokens)
    return SimpleNamespace(logprob=logprob, sampling_params=params)


def test_an_output_token_is_scored_without_the_row() -> None:
    """The scores of /v1/score, asked for at that position, stay."""
    processor = SimpleNamespace(_initialize_empty_logprob_containers=lambda _request: None)
    output = SimpleNamespace(
        next_token_logprobs=[-0.5, -0.25],
        next_token_top_logprobs_val=[[-0.5], [-0.25]], next_token_top_logprobs_idx=[[7], [8]],
        next_token_token_ids_logprobs_val=[[-2.0], [-3.0]],
        next_token_token_ids_logprobs_idx=[[3], [3]],
    )  # fmt: skip
    for row, tokens in enumerate((0, 4)):
        request = request_of(tokens)
        given = processor, row, request, 0, [7, 8], 0, output
        count = original(ADD)(*given)
        kept = request.logprob
        assert kept.output_token_logprobs_val == [(-0.5, -0.25)[row]]
        assert drop_output_logprobs(count, *given) == count == 0
        assert kept.output_token_logprobs_val == [[], [-0.25]][row]
        assert kept.output_token_logprobs_idx == [[], [8]][row]
        assert kept.output_token_ids_logprobs_val == [[(-2.0, -3.0)[row]]]
        assert kept.output_top_logprobs_val == [[(-0.5, -0.25)[row]]]
