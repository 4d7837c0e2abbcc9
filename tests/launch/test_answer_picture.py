"""The picture of two answers: lines, colors by step, figures, and what it needs to be read."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest

from launch.demo.answer_picture import COLUMNS, WIDTH, TimedAnswer, picture, wrap_steps

STEPS = ["Once", " upon", " a ti", "me <b> & so", " on\n\n  end"]


def text_of(steps: list[str]) -> list[str]:
    return ["".join(text for text, _ in line) for line in wrap_steps(steps)]


@pytest.mark.parametrize(
    ("steps", "lines"),
    [
        (STEPS, ["Once upon a time <b> & so on", "", "  end"]),
        (["word " * 20], [("word " * 20)[:55].rstrip(" "), ("word " * 9)]),
        (["x" * 70 + " y"], ["x" * 70 + "", "y"]),
        ([], [""]),
    ],
)
def test_lines_break_at_spaces_and_keep_their_steps(steps: list[str], lines: list[str]) -> None:
    assert [line.rstrip() for line in text_of(steps)] == [line.rstrip() for line in lines]
    assert "".join("".join(text_of(steps)).split()) == "".join("".join(steps).split())
    for line in wrap_steps(steps):
        for text, step in line:
            assert text in steps[step]


def test_a_picture_shows_both_answers_from_their_first_line() -> None:
    slow, fast = TimedAnswer("plain", STEPS[:2], 2, 0.25), TimedAnswer("DFLASH", STEPS, 14, 0.25)
    drawn = picture("Tell me\n a <story> " + "and more " * 40, [slow, fast], "a model, a machine")
    root = ElementTree.fromstring(drawn)
    texts = ["".join(node.itertext()) for node in root.iter() if node.tag.endswith("}text")]
    assert texts[0].startswith("> Tell me a <story>") and texts[0].endswith("...")
    assert texts.count("Once") == 2 and "8.0" in texts and "56.0" in texts
    assert "7.00x as fast" in texts and "2.80 tokens a step" in texts
    assert texts[-1] == "a model, a machine"
    # It takes nothing from elsewhere, and is readable on dark pages.
    assert "http" not in drawn.replace("http://www.w3.org/2000/svg", "")
    assert "prefers-color-scheme: dark" in drawn
    right = [float(n.get("x", 0)) for n in root.iter() if n.tag.endswith("}text")]
    assert max(right) < WIDTH and COLUMNS * 9 + 32 <= WIDTH - 176 + 20
