"""Answers of several servers to one prompt at one moment, as an SVG for light and dark pages: one
panel a server, from the answer's first line on, and beside it how fast the server is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from typing import NamedTuple

# Pixels, and characters of a line of an answer.
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


class Shown(NamedTuple):
    """An answer up to a moment.

    Attributes:
        name: of the server.
        steps: the text that each step has added.
        tokens: of the answer so far.
        seconds: since the request.
    """

    name: str
    steps: Sequence[str]
    tokens: int
    seconds: float

    @property
    def rate(self) -> float:
        """Tokens/s."""
        return self.tokens / self.seconds


def picture(prompt: str, answers: Sequence[Shown], caption: str) -> str:
    """The SVG; all panels are as high as the longest answer.

    Args:
        answers: the first one is what the others are compared with.
        caption: the model, the machine and the command.
    """
    lines = [wrapped(answer.steps) for answer in answers]
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
        f'aria-label="{escape(_spoken(answers), quote=True)}">\n<style>{_STYLE}\n</style>\n'
        f'<rect class="page" width="{WIDTH}" height="{total}"/>\n{body}\n</svg>\n'
    )


_LEGEND = "Tokens of one step have one color. Both panels: the moment at which one answer ends."


def wrapped(steps: Sequence[str]) -> list[list[tuple[str, int]]]:
    """Lines of an answer, as pieces of text and the number of the step that they come from."""
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
    """Line ends, runs of spaces and words, each in pieces of one step."""
    word = list[tuple[str, int]]()
    before = ""
    for number, added in enumerate(steps):
        for character in added:
            kind = "\n" if character == "\n" else " " if character.isspace() else "word"
            if word and (kind != before or kind == "\n"):
                yield word
                word = []
            if word and word[-1][1] == number:
                word[-1] = (word[-1][0] + character, number)
            else:
                word.append((character, number))
            before = kind
    if word:
        yield word


def _panel(
    answer: Shown, rows: list[list[tuple[str, int]]], top: float, height: float, first: Shown
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
    if answer is not first:
        yield _text(right, top + 122, "name", f"{answer.rate / first.rate:.2f}x as fast")


def _text(x: float, y: float, style: str, text: str) -> str:
    return f'<text class="{style}" x="{x:g}" y="{y:g}">{escape(text)}</text>'


def _cut(text: str) -> str:
    most = int((WIDTH - 2 * MARGIN) / _CHARACTER) - 2
    return text if len(text) <= most else f"{text[: most - 3]}..."


def _spoken(answers: Sequence[Shown]) -> str:
    rates = ", ".join(f"{answer.name} {answer.rate:.1f} tokens/s" for answer in answers)
    return f"Two servers answer one prompt: {rates}"
