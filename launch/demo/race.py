"""Live answers of several servers to one prompt, one above the other, for a terminal of 80 x 24.

The tokens of a step have one color, and each panel shows the speed of its server.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from launch.demo.answer_picture import TimedAnswer
from sglang_dflash.tools.bench.load import chunks

WIDTH, LINES = 80, 8
COLORS = ("cyan", "yellow", "magenta", "green")


class LiveAnswer:
    """A server's answer as far as it has come.

    Attributes:
        name: the server's name.
        steps: the text that each step has added.
        times: for each step, seconds since the request and number of tokens so far.
        ended: whether the answer is complete.
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
        length, began = 0, time.perf_counter()
        for chunk in chunks(f"{url}/generate", {**body, "stream": True}):
            self.steps.append(chunk["text"][length:])
            length = len(chunk["text"])
            tokens = chunk["meta_info"]["completion_tokens"]
            self.times.append((time.perf_counter() - began, tokens))
        self.ended = True

    def until(self, seconds: float) -> TimedAnswer:
        """Return the answer as it was `seconds` after the request."""
        count = sum(at <= seconds for at, _ in self.times)
        tokens = self.times[count - 1][1] if count else 0
        return TimedAnswer(self.name, self.steps[:count], tokens, seconds)

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


def frame(prompt: str, lanes: Sequence[LiveAnswer], width: int = WIDTH) -> RenderableType:
    """Return a prompt with its answers below."""
    line = " ".join(prompt.split())
    title = Text(f"> {line}", "bold", no_wrap=True, overflow="ellipsis")
    return Group(title, *(lane.panel(width) for lane in lanes))


def race(
    urls: Mapping[str, str],
    prompts: Sequence[tuple[str, Any]],
    sampling: Mapping[str, Any],
) -> None:
    """Show servers that answer prompts at once. They share the machine, so speeds are no
    measurement.

    Args:
        urls: server name -> URL.
        prompts: text and token ids of each prompt.
        sampling: SGLang's sampling parameters.
    """
    console = Console()
    width = min(WIDTH, console.width)
    for prompt, ids in prompts:
        lanes = [LiveAnswer(name) for name in urls]
        body = {"input_ids": ids, "sampling_params": dict(sampling)}

        def drawn(
            prompt: str = prompt, lanes: Sequence[LiveAnswer] = tuple(lanes)
        ) -> RenderableType:
            return frame(prompt, lanes, width)

        with Live(get_renderable=drawn, console=console), ThreadPoolExecutor() as pool:
            running = [
                pool.submit(lane.read, url, body)
                for lane, url in zip(lanes, urls.values(), strict=True)
            ]
            for future in running:
                future.result()
        console.print()
