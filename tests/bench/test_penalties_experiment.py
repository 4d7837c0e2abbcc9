"""The report of `python -m experiments penalties`, from made-up passes."""

from __future__ import annotations

from experiments import penalties
from experiments.penalties import OURS, PLAIN, Options
from sglang_dflash.bench.load import Answer, Pass
from sglang_dflash.drafting.acceptance_length import VerifySteps


def one_pass(seconds: float, *answers: tuple[int, ...], steps: int = 0) -> Pass:
    made = [[Answer("", ids, len(ids), 0.1, seconds)] for ids in answers]
    return Pass(seconds, made, VerifySteps(steps, 3 * steps))


def test_ratios_and_differing_answers() -> None:
    same, other = ((1, 2, 3), (4, 5, 6)), ((1, 2, 3), (4, 5, 7))
    passes = {
        PLAIN: [one_pass(2.0, *same), one_pass(2.0, *same)],
        OURS: [one_pass(1.0, *same, steps=2), one_pass(0.5, *same, steps=4)],
    }
    result = penalties.report({1.5: passes}, Options(rounds=2))
    (of,) = result["penalties"]
    assert of["presence_penalty"] == 1.5 and result["prompts"] == 16
    ours = of[OURS]
    assert ours["differing_answers"] == 0
    assert (ours["over_plain"], ours["over_plain_min"], ours["over_plain_max"]) == (3, 2, 4)
    assert ours["acceptance_length"] == 3 and of[PLAIN]["acceptance_length"] is None
    assert penalties.failure(result) is None
    passes[OURS][1] = one_pass(0.5, *other, steps=4)
    result = penalties.report({1.5: passes}, Options(rounds=2))
    assert result["penalties"][0][OURS]["differing_answers"] == 1
    assert "1.5" in str(penalties.failure(result))
