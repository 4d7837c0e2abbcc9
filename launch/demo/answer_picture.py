"""The answers of several servers to one prompt at one moment, as an SVG for light and dark pages.

Each server has a panel with the beginning of its answer and its speed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from typing import NamedTuple

# Sizes in pixels; COLUMNS is in characters.
WIDTH, RIGHT, LINE, MARGIN, COLUMNS = 720, 176, 21, 16, 56
_CHARACTER = 9.0

_STYLE = """
text { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace;
  font-size: 15px; white-space: pre }
.page { fill: #ffffff } .panel { fill: #f6f8fa; stroke: #d0d7de }
.ink { fill: #1f2328 } .soft { fill: #59636e; font-size: 14px }
.even { fill: #0550ae } .odd { fill: #953800 } .rate { fill: #1f2328; font-size: 34px;
  font-weight: bold } .name { fill: #1f2328; font-weight: bold }
@media (prefers-color-scheme: dark) {
  .page { fill: #0d1117 } .panel { fill: #161b22; stroke: #3d444d }
  .ink, .rate, .name { fill: #f0f6fc } .soft { fill: #9198a1 }
  .even { fill: #79c0ff } .odd { fill: #ffa657 }
}"""


class TimedAnswer(NamedTuple):
    """An answer up to a moment.

    Attributes:
        name: the server's name.
        steps: the text that each step has added.
        tokens: number of tokens so far.
        seconds: time since the request.
    """

    name: str
    steps: Sequence[str]
    tokens: int
    seconds: float

    @property
    def rate(self) -> float:
        """Tokens/s."""
        return self.tokens / self.seconds


def picture(prompt: str, answers: Sequence[TimedAnswer], caption: str) -> str:
    """Return the SVG. All panels are as high as the longest answer needs.

    Args:
        answers: the others are compared with the first one.
        caption: the model, the machine and the command.
    """
    lines = [wrap_steps(answer.steps) for answer in answers]
    height = LINE * max(6, *map(len, lines)) + 2 * MARGIN
    parts, top = [_text(MARGIN, 28, "ink", f"> {_cut(' '.join(prompt.split()))}")], 44.0
    for answer, rows in zip(answers, lines, strict=True):
        parts += _panel(answer, rows, top, height, answers[0])
        top += height + 10
    parts.append(_text(MARGIN, top + 14, "soft", _LEGEND))
    parts.append(_text(MARGIN, top + 34, "soft", caption))
    total = int(top + 46)
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {total}" role="img" '
        f'aria-label="{escape(_alt_text(answers), quote=True)}">\n<style>{_STYLE}\n</style>\n'
        f'<rect class="page" width="{WIDTH}" height="{total}"/>\n{body}\n</svg>\n'
    )


_LEGEND = "Tokens of one step have one color. Both panels: the moment at which one answer ends."


def wrap_steps(steps: Sequence[str]) -> list[list[tuple[str, int]]]:
    """Wrap an answer into lines of pieces: a text, and the index of the step that added it."""
    lines: list[list[tuple[str, int]]] = [[]]
    column = 0
    for word in _words(steps):
        length = sum(len(text) for text, _ in word)
        if word[0][0] == "\n":
            lines.append([])
            column = 0
            continue
        if column + length > COLUMNS and column:
            lines.append([])
            column = 0
            if word[0][0].isspace():
                continue
        lines[-1] += word
        column += length
    return lines


def _words(steps: Sequence[str]) -> Iterator[list[tuple[str, int]]]:
    """Yield line ends, runs of spaces and words, each as pieces of one step."""
    word = list[tuple[str, int]]()
    before = ""
    for number, added in enumerate(steps):
        for character in added:
            character_class = "\n" if character == "\n" else " " if character.isspace() else "word"
            if word and (character_class != before or character_class == "\n"):
                yield word
                word = []
            if word and word[-1][1] == number:
                word[-1] = (word[-1][0] + character, number)
            else:
                word.append((character, number))
            before = character_class
    if word:
        yield word


def _panel(
    answer: TimedAnswer,
    rows: list[list[tuple[str, int]]],
    top: float,
    height: float,
    reference: TimedAnswer,
) -> Iterator[str]:
    yield (
        f'<rect class="panel" x="0.5" y="{top + 0.5}" width="{WIDTH - 1}" height="{height - 1}" '
        'rx="8"/>'
    )
    for number, row in enumerate(rows):
        x, y = float(MARGIN), top + MARGIN + LINE * (number + 0.75)
        for text, step in row:
            yield _text(x, y, "odd" if step % 2 else "even", text)
            x += _CHARACTER * len(text)
    right = WIDTH - RIGHT
    yield _text(right, top + 34, "name", answer.name)
    yield _text(right, top + 74, "rate", f"{answer.rate:.1f}")
    yield _text(right + 92, top + 74, "soft", "tokens/s")
    steps = answer.tokens / max(1, len(answer.steps))
    yield _text(right, top + 100, "soft", f"{steps:.2f} tokens a step")
    if answer is not reference:
        yield _text(right, top + 122, "name", f"{answer.rate / reference.rate:.2f}x as fast")


def _text(x: float, y: float, style: str, text: str) -> str:
    return f'<text class="{style}" x="{x:g}" y="{y:g}">{escape(text)}</text>'


def _cut(text: str) -> str:
    columns = int((WIDTH - 2 * MARGIN) / _CHARACTER) - 2
    return text if len(text) <= columns else f"{text[: columns - 3]}..."


def _alt_text(answers: Sequence[TimedAnswer]) -> str:
    rates = ", ".join(f"{answer.name} {answer.rate:.1f} tokens/s" for answer in answers)
    return f"Two servers answer one prompt: {rates}"
