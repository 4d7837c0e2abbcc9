"""`sglang-dflash env`: works without SGLang, and with a release that we were not written for."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import Any

from sglang_dflash.facts.errors import ConfigError
from sglang_dflash.repairs.seams import SEAMS as REPAIRS
from sglang_dflash.seam.seam import Seam, load_plugins, state
from sglang_dflash.seam.version import unsupported
from sglang_dflash.serving.seams import REPLAY_SEAMS, SEAMS, WORKER_SEAMS

OURS, BUILTIN = "sglang-dflash", "SGLang's built-in worker"
_GROUPS = ("sglang.srt.plugins", "sglang.srt.platforms")
_PACKAGES = ("sglang-dflash", "sglang", "torch", "triton", "transformers", "huggingface_hub")
# Named only if they are installed.
_KERNELS = (
    "sglang-kernel",
    "sgl-kernel",
    "flashinfer-python",
    "flash-attn-4",
    "flash-attn",
    "flash-linear-attention",
    "tilelang",
)
_VARIABLES = ("SGLANG_", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "HF_HUB_OFFLINE", "HF_ENDPOINT")
_SECRET = ("KEY", "TOKEN", "SECRET", "PASSWORD")


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
        "devices": devices(),
        "platform": None if found is None else type(found).__name__,
        "variables": variables(),
        "plugins": _plugins(),
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
    kernels = {name: version for name in _KERNELS if (version := _version(name)) is not None}
    return {
        "python": platform.python_version(),
        **{name: _version(name) for name in _PACKAGES},
        **kernels,
        "system": platform.platform(),
    }


def devices() -> list[str]:
    """The processor, then the accelerators that torch finds, in words."""
    try:
        import torch
    except ImportError as error:
        return [f"torch cannot be imported ({error})"]
    from sglang_dflash.bench.machine import hardware

    machine = hardware()
    memory = f"{machine['memory_gib']:.0f} GiB of memory"
    found = [f"{machine['processor']}, {machine['cores']} cores, {memory}"]
    if torch.cuda.is_available():
        for i in range(torch.cuda.device_count()):
            of = torch.cuda.get_device_properties(i)
            found.append(
                f"{of.name}, {of.total_memory / 2**30:.0f} GiB, compute capability "
                f"{of.major}.{of.minor}, CUDA {torch.version.cuda}"
            )
    elif torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator()
        found.append(f"{torch.accelerator.device_count()} of type {kind}")
    else:
        found.append("no accelerator")
    return found


def variables() -> dict[str, str]:
    """Environment variables that are set and change what a server does, without secrets."""
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith(_VARIABLES) and not any(word in name for word in _SECRET)
    }


def _plugins() -> list[dict[str, Any]]:
    """The installed plugins of SGLang's two groups, with their distribution."""
    return [
        {
            "group": group,
            "name": entry.name,
            "value": entry.value,
            "distribution": entry.dist.name if entry.dist else None,
            "version": entry.dist.version if entry.dist else None,
        }
        for group in _GROUPS
        for entry in importlib.metadata.entry_points(group=group)
    ]


def _seams(found: object | None) -> list[dict[str, str]]:
    """Every row of our tables as text, with its state in this process. `found`: the platform."""
    serving = {"serving": SEAMS, "worker": WORKER_SEAMS, "replay": REPLAY_SEAMS}
    tables = {**serving, "repairs": REPAIRS}
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
    plugins = {
        f"{of['name']} ({of['group']})": f"{of['value']}, of {of['distribution']} {of['version']}"
        for of in report["plugins"]
    }
    known = {name: version or "not installed" for name, version in report["versions"].items()}
    sections = {
        "versions": _aligned(known),
        "devices": [*report["devices"], f"SGLang's platform: {report['platform'] or 'not known'}"],
        "variables": _aligned(report["variables"]) or ["none is set"],
        "plugins": _aligned(plugins) or ["none is installed"],
        "seams": _seam_lines(report["seams"]) or ["not checked without SGLang"],
    }
    shown = ["\n".join([f"{title}:", *(f"  {x}" for x in of)]) for title, of in sections.items()]
    return "\n\n".join([f"worker: {report['worker']}\nwhy: {report['reason']}", *shown])


def _aligned(facts: Mapping[str, str]) -> list[str]:
    width = max(map(len, facts), default=0)
    return [f"{name:<{width}}  {value}" for name, value in facts.items()]


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
