"""Answers of several servers to one prompt as they come, one above the other, on a terminal of 80 x
24: the tokens of one step have one color, and each panel tells how fast its server is."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from launch.demo.answer_picture import Shown
from sglang_dflash.tools.bench.load import chunks

WIDTH, LINES = 80, 8
COLORS = ("cyan", "yellow", "magenta", "green")


class Lane:
    """A server's answer as far as it is.

    Attributes:
        name: of the server.
        steps: the text that each of its steps has added.
        times: of each step, seconds since the request, and the tokens of the answer so far.
        ended: whether that is all.
    """

    def __init__(self, name: str) -> None:
        self.name, self.steps, self.ended = name, list[str](), False
        self.times = list[tuple[float, int]]()

    @property
    def tokens(self) -> int:
        """Tokens of the answer so far."""
        return self.times[-1][1] if self.times else 0

    @property
    def seconds(self) -> float:
        """Seconds from the request to the newest token."""
        return self.times[-1][0] if self.times else 0.0

    def read(self, url: str, body: Mapping[str, Any]) -> None:
        """Follow the answer of the server at `url` to its end."""
        known, began = 0, time.perf_counter()
        for chunk in chunks(f"{url}/generate", {**body, "stream": True}):
            self.steps.append(chunk["text"][known:])
            known = len(chunk["text"])
            tokens = chunk["meta_info"]["completion_tokens"]
            self.times.append((time.perf_counter() - began, tokens))
        self.ended = True

    def until(self, seconds: float) -> Shown:
        """The answer as it was that many seconds after the request."""
        count = sum(at <= seconds for at, _ in self.times)
        tokens = self.times[count - 1][1] if count else 0
        return Shown(self.name, self.steps[:count], tokens, seconds)

    def panel(self, width: int) -> Panel:
        """The last lines of the answer."""
        text = Text()
        for number, added in enumerate(self.steps):
            text.append(added, COLORS[number % len(COLORS)])
        lines = text.wrap(Console(width=width), width - 4)[-LINES:]
        seconds = self.seconds
        rate = f"{self.tokens / seconds:.1f} tokens/s" if self.tokens else "waiting"
        per_step = f"{self.tokens / max(1, len(self.steps)):.2f} per step"
        return Panel(
            Text("\n").join(lines),
            title=f"{self.name}: {rate}, {per_step}",
            subtitle=f"done, {self.tokens} tokens in {seconds:.1f} s" if self.ended else None,
            width=width,
            height=LINES + 2,
        )


def frame(asked: str, lanes: Sequence[Lane], width: int = WIDTH) -> RenderableType:
    """A prompt above the answers to it."""
    line = " ".join(asked.split())
    prompt = Text(f"> {line}", "bold", no_wrap=True, overflow="ellipsis")
    return Group(prompt, *(lane.panel(width) for lane in lanes))


def race(
    urls: Mapping[str, str],
    asked: Sequence[tuple[str, Any]],
    sampling: Mapping[str, Any],
) -> None:
    """Let servers answer prompts at once. To look at: they share the machine, so what is shown is
    no measurement.

    Args:
        urls: of the servers, by name.
        asked: of each prompt what is shown, and its token ids.
        sampling: SGLang's sampling parameters.
    """
    console = Console()
    width = min(WIDTH, console.width)
    for shown, ids in asked:
        lanes = [Lane(name) for name in urls]
        body = {"input_ids": ids, "sampling_params": dict(sampling)}

        def drawn(shown: str = shown, lanes: Sequence[Lane] = tuple(lanes)) -> RenderableType:
            return frame(shown, lanes, width)

        with Live(get_renderable=drawn, console=console), ThreadPoolExecutor() as pool:
            running = [
                pool.submit(lane.read, url, body)
                for lane, url in zip(lanes, urls.values(), strict=True)
            ]
            for one in running:
                one.result()
        console.print()
