"""`sglang-dflash env`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import Any

from sglang_dflash.cli import environment
from sglang_dflash.facts.errors import ConfigError
from sglang_dflash.repairs.seams import SEAMS as REPAIRS
from sglang_dflash.seam.seam import Seam, load_plugins, state
from sglang_dflash.seam.version import unsupported
from sglang_dflash.serving.seams import REPLAY_SEAMS, SEAMS

# The name of our entry point that puts our worker in SGLang's place.
PLUGIN = "dflash"
# What is expected of a table's rows in this process, where it is not that they are applied.
_EXPECTED = {
    "replay": "can be applied; a scheduler does if its target has Gated DeltaNet layers",
}
_OURS, _BUILTIN = "sglang-dflash", "SGLang's built-in worker"


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
    platform, problem, installed = None, None, environment.version_of("sglang") is not None
    if installed:
        print("loading SGLang and its plugins ...", file=sys.stderr)
        platform, problem = load_plugins()
    plugins = environment.plugins()
    worker, reason = _worker(installed, problem, plugins)
    if worker == _OURS and target is not None and draft is not None:
        worker, reason = _pair_worker(target, draft)
    return {
        "worker": worker,
        "reason": reason,
        "versions": environment.versions(),
        "devices": environment.devices(),
        "platform": None if platform is None else type(platform).__name__,
        "variables": environment.variables(),
        "plugins": plugins,
        "seams": _seams(platform) if installed else [],
    }


def _worker(
    installed: bool, problem: str | None, plugins: Iterable[Mapping[str, Any]]
) -> tuple[str, str]:
    """Which worker this installation gives a pair that ours can serve, and why."""
    mismatch = unsupported()
    if not installed:
        return "none", f"{mismatch}; inspect works, and generate if torch is there"
    if problem is not None:
        return "none", f"a server ends at start: {problem}"
    if mismatch is not None:
        return _BUILTIN, mismatch
    ours = [plugin for plugin in plugins if plugin["name"] == PLUGIN]
    left_out = [plugin["left_out"] for plugin in ours if plugin["left_out"]]
    if not ours or left_out:
        why = left_out[0] if left_out else "it is not registered; install the package again"
        return _BUILTIN, f"our plugin {PLUGIN!r} is not loaded: {why}"
    return _OURS, "for every DFlash v1 draft; add --target and --draft to ask about one pair"


def _pair_worker(target: str, draft: str) -> tuple[str, str]:
    from sglang_dflash.facts.published import look_up
    from sglang_dflash.inspect.pair import choose_worker

    found, reason = choose_worker(look_up("target", target), look_up("draft", draft))
    worker = _BUILTIN if found == "builtin" else found
    return worker, reason or "it serves this pair, unless a flag of the server asks for another"


def _seams(platform: object | None) -> list[dict[str, str]]:
    """Every row of our tables as text, with its state in this process."""
    tables = {"serving": SEAMS, "replay": REPLAY_SEAMS, "repairs": REPAIRS}
    from sglang_dflash.platform_cpu import is_active

    if is_active(platform):
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
    versions = {name: version or "not installed" for name, version in report["versions"].items()}
    plugins = {
        f"{plugin['name']} ({plugin['group']})": f"{plugin['value']}, of {plugin['distribution']} "
        f"{plugin['version']}"
        + (f"; left out by {plugin['left_out']}" if plugin["left_out"] else "")
        for plugin in report["plugins"]
    }
    devices = [*report["devices"], f"SGLang's platform: {report['platform'] or 'not known'}"]
    sections = [
        f"worker: {report['worker']}\nwhy: {report['reason']}",
        _section("versions", _aligned(versions)),
        _section("devices", devices),
        _section("variables", _aligned(report["variables"]) or ["none is set"]),
        _section("plugins", _aligned(plugins) or ["none is installed"]),
        _section("seams", _seam_lines(report["seams"]) or ["not checked without SGLang"]),
    ]
    return "\n\n".join(sections)


def _section(title: str, lines: Iterable[str]) -> str:
    return "\n".join([f"{title}:", *(f"  {line}" for line in lines)])


def _aligned(facts: Mapping[str, str]) -> list[str]:
    width = max(map(len, facts), default=0)
    return [f"{name:<{width}}  {value}" for name, value in facts.items()]


def _seam_lines(rows: Iterable[Mapping[str, str]]) -> list[str]:
    lines = []
    for table, group in groupby(rows, key=lambda row: row["table"]):
        members = list(group)
        expected = "not applied" if table == "replay" else "applied"
        others = [row for row in members if row["state"] != expected]
        count = f"{len(members) - len(others)} of {len(members)}"
        lines.append(f"{table}: {count} {_EXPECTED.get(table, 'applied')}")
        lines += [
            f"  {row['state']}: {row['target']}" + (f" ({row['detail']})" if row["detail"] else "")
            for row in others
        ]
    return lines
