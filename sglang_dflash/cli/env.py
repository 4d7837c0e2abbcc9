"""`sglang-dflash env`: works without SGLang, and with a release that we were not written for."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import sys
from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import Any

from sglang_dflash.bench.machine import hardware
from sglang_dflash.facts.errors import ConfigError
from sglang_dflash.repairs.seams import SEAMS as REPAIRS
from sglang_dflash.seam.seam import Seam, load_plugins, state
from sglang_dflash.seam.version import unsupported
from sglang_dflash.serving.seams import REPLAY_SEAMS, SEAMS

OURS, BUILTIN = "sglang-dflash", "SGLang's built-in worker"
_PACKAGES = ("sglang-dflash", "sglang", "torch", "triton", "transformers", "huggingface_hub")


def arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--target", help="with --draft: which worker would serve this pair")
    add("--draft", help="a folder or a hub name, as for inspect")
    add("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> None:
    if (args.target is None) != (args.draft is None):
        raise ConfigError("--target and --draft", required="give both or neither")
    report = _report(args.target, args.draft)
    print(json.dumps(report) if args.json else as_text(report))


def _report(target: str | None, draft: str | None) -> dict[str, Any]:
    found, problem, seams = None, None, list[dict[str, str]]()
    if _version("sglang") is not None:
        print("loading SGLang and its plugins ...", file=sys.stderr)
        found, problem = load_plugins()
        seams = _seams(found)
    worker, reason = _worker(problem, seams)
    if worker == OURS and target is not None and draft is not None:
        worker, reason = _pair_worker(target, draft)
    return {
        "worker": worker,
        "reason": reason,
        "versions": versions(),
        "machine": hardware(),
        "platform": None if found is None else type(found).__name__,
        "seams": seams,
    }


def _worker(problem: str | None, seams: Iterable[Mapping[str, str]]) -> tuple[str, str]:
    """Which worker this installation gives a pair that ours can serve, and why."""
    mismatch = unsupported()
    if _version("sglang") is None:
        return "none", f"{mismatch}; inspect works, and generate if torch is there"
    if problem is not None:
        return "none", f"a server ends at start: {problem}"
    if mismatch is not None:
        return BUILTIN, mismatch
    if ("serving", "applied") not in {(row["table"], row["state"]) for row in seams}:
        return BUILTIN, (
            "our plugin dflash is not loaded: SGLANG_PLUGINS or SGLANG_PLATFORM leaves it out, or "
            "it is not registered; then install the package again"
        )  # fmt: skip
    return OURS, "for every DFlash v1 draft; add --target and --draft to ask about one pair"


def _pair_worker(target: str, draft: str) -> tuple[str, str]:
    from sglang_dflash.facts.published import look_up
    from sglang_dflash.inspect.pair import judge

    judged = judge(look_up("target", target), look_up("draft", draft))
    worker = BUILTIN if judged.worker == "builtin" else judged.worker
    return worker, judged.reason or (
        "it serves this pair, unless a flag of the server asks for another"
    )


def _version(package: str) -> str | None:
    """The installed version of a distribution, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def versions() -> dict[str, str | None]:
    """Versions by name; None for what is not installed."""
    found = {name: _version(name) for name in _PACKAGES}
    return {"python": platform.python_version(), **found, "system": platform.platform()}


def _seams(found: object | None) -> list[dict[str, str]]:
    """Every row of our tables as text, with its state in this process. `found`: the platform."""
    tables = {"serving": SEAMS, "replay": REPLAY_SEAMS, "repairs": REPAIRS}
    from sglang_dflash.platform_cpu import is_active

    if is_active(found):
        from sglang_dflash.platform_cpu import seams

        tables["platform_cpu"] = seams.SEAMS
    return [_described(name, row) for name, rows in tables.items() for row in rows]


def _described(table: str, row: Seam) -> dict[str, str]:
    stands, detail = state(row)
    return {
        "table": table,
        "target": row.target,
        "kind": row.kind.value,
        "ours": row.ours_name,
        "reason": row.reason,
        "proof": row.proof,
        "state": stands,
        "detail": detail,
    }


def as_text(report: Mapping[str, Any]) -> str:
    """The report for reading. Of the seams, those that are applied are only counted."""
    machine = report["machine"]
    accelerator = machine["accelerator"] or "no accelerator"
    sections = {
        "versions": [f"{k:15} {v or 'not installed'}" for k, v in report["versions"].items()],
        "machine": [
            f"{machine['processor']}, {machine['cores']} cores, {machine['memory_gib']} GiB",
            f"{accelerator}; SGLang's platform: {report['platform'] or 'not known'}",
        ],
        "seams": _seam_lines(report["seams"]) or ["not checked without SGLang"],
    }
    shown = ["\n".join([f"{title}:", *(f"  {x}" for x in of)]) for title, of in sections.items()]
    return "\n\n".join([f"worker: {report['worker']}\nwhy: {report['reason']}", *shown])


def _seam_lines(rows: Iterable[Mapping[str, str]]) -> list[str]:
    lines = []
    for table, group in groupby(rows, key=lambda row: row["table"]):
        members, expected, said = list(group), "applied", "applied"
        if table == "replay":
            expected = "not applied"
            said = "can be applied; a scheduler does if its target has Gated DeltaNet layers"
        others = [row for row in members if row["state"] != expected]
        lines.append(f"{table}: {len(members) - len(others)} of {len(members)} {said}")
        lines += [
            f"  {row['state']}: {row['target']}" + (f" ({row['detail']})" if row["detail"] else "")
            for row in others
        ]
    return lines
