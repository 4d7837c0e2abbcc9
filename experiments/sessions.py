"""Number of requests of 65,536 tokens that run at a time on one card, computed, not measured.

With SGLang's DFLASH worker, with ours, and without a draft, by `sglang-dflash inspect`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_dflash.checkpoint.origin import published_draft
from sglang_dflash.checkpoint.published import look_up
from sglang_dflash.common.command_line import setting
from sglang_dflash.common.errors import ConfigError
from sglang_dflash.drafting.options import Options as DraftOptions
from sglang_dflash.tools.inspect.report import inspect
from sglang_dflash.tools.inspect.serving import Serving
from sglang_dflash.tools.inspect.suggest import Pair, suggest

# Target -> number of GPUs that it is split over.
TARGETS = {
    "Qwen/Qwen3.5-27B": 1,
    "Qwen/Qwen3.6-27B": 1,
    "Qwen/Qwen3.8-27B": 1,
    "Qwen/Qwen3.6-35B-A3B": 1,
    "Qwen/Qwen3.5-122B-A10B": 4,
}
CARDS, CONTEXT = (80, 96, 140, 180), 65536
# The target and card of the picture.
SHOWN, SHOWN_CARD = "Qwen/Qwen3.6-35B-A3B", 140
BUILTIN, OURS, NONE = "SGLang's worker", "as served", "without a draft"
BY_DEFAULT = "ours, default flags"


@dataclass(frozen=True)
class Options:
    picture: str = setting("", "also draw the figures of one target and card, as SVG")


def run(options: Options) -> dict[str, Any]:
    rows = {target: {str(gib): fit_sessions(target, gib) for gib in CARDS} for target in TARGETS}
    if options.picture:
        Path(options.picture).write_text(picture(rows[SHOWN][str(SHOWN_CARD)]))
    return {"context": CONTEXT, "rows": rows}


def fit_sessions(target: str, gib: int) -> dict[str, int]:
    """Return the most requests at a time on a card of `gib` GiB, for each kind of server, and for
    ours with default flags."""
    serving = Serving(memory_gib=float(gib), context=CONTEXT, tp_size=TARGETS[target])
    facts = look_up("target", target, offline=True)
    pair = Pair(
        facts,
        look_up("draft", published_draft(target), offline=True),
        DraftOptions(),
        serving,
        None,
    )
    try:
        report = inspect(pair.target, pair.draft, pair.options, serving)
        by_default = int(report["requests_at_context"])
    except ConfigError:
        by_default = 0
    return {**suggest(pair)["most"], BY_DEFAULT: by_default}


def table(result: Mapping[str, Any]) -> list[str]:
    """Format Markdown rows: SGLang's worker / ours by default / ours / without a draft."""
    order = (BUILTIN, BY_DEFAULT, OURS, NONE)
    lines = [
        "| target | " + " | ".join(f"{gib} GiB" for gib in CARDS) + " |",
        "| --- |" + " --- |" * len(CARDS),
    ]
    for target, cards in result["rows"].items():
        cells = (" / ".join(str(cards[str(gib)][name]) for name in order) for gib in CARDS)
        gpus = f", {TARGETS[target]} GPUs" if TARGETS[target] > 1 else ""
        lines.append(f"| {target}{gpus} | {' | '.join(cells)} |")
    return lines


_BARS = {BUILTIN: "SGLang's DFLASH worker", OURS: "sglang-dflash", NONE: "without a draft"}
_WIDTH, _BAR, _LEFT, _MOST = 720, 40, 250, 390
_STYLE = """
text { font-family: system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif;
  font-size: 17px; fill: #1f2328 }
.title { font-size: 18px; font-weight: 600 } .count { font-size: 24px; font-weight: 700 }
.soft { font-size: 14px; fill: #59636e } .page { fill: #ffffff }
.bar { fill: #8c959f } .ours { fill: #0969da }
@media (prefers-color-scheme: dark) {
  text { fill: #f0f6fc } .soft { fill: #9198a1 } .page { fill: #0d1117 }
  .bar { fill: #656c76 } .ours { fill: #4493f8 }
}"""


def picture(counts: Mapping[str, int]) -> str:
    """Bars of one target and card, as SVG for light and dark pages."""
    title = f"Sessions of 65,536 tokens of {SHOWN.split('/')[1]} on one H200"
    spoken = ", ".join(f"{words} {counts[name]}" for name, words in _BARS.items())
    parts = [f'<text class="title" x="16" y="32">{title}</text>']
    for number, (name, words) in enumerate(_BARS.items()):
        top = 52 + number * (_BAR + 12)
        length = round(_MOST * counts[name] / max(counts.values()))
        style = "ours" if name == OURS else "bar"
        parts += [
            f'<text x="16" y="{top + 26}">{words}</text>',
            f'<rect class="{style}" x="{_LEFT}" y="{top}" width="{length}" height="{_BAR}"/>',
            f'<text class="count" x="{_LEFT + length + 12}" y="{top + 29}">{counts[name]}</text>',
        ]
    foot = 52 + len(_BARS) * (_BAR + 12) + 16
    source = "Computed, not measured: python -m experiments sessions (140 GiB, bfloat16)"
    parts.append(f'<text class="soft" x="16" y="{foot}">{source}</text>')
    body, height = "\n".join(parts), foot + 16
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img" '
        f'aria-label="{title}: {spoken}">\n<style>{_STYLE}\n</style>\n'
        f'<rect class="page" width="{_WIDTH}" height="{height}"/>\n{body}\n</svg>\n'
    )
