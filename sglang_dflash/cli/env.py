"""`sglang-dflash env`: works without SGLang, and with a release that we were not written for."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import sys
from collections.abc import Mapping
from typing import Any

from sglang_dflash.bench.machine import hardware
from sglang_dflash.facts.errors import ConfigError
from sglang_dflash.seam.seam import any_in_place, load_plugins
from sglang_dflash.seam.version import unsupported
from sglang_dflash.serving.seams import SEAMS

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
    found, problem = None, None
    if _version("sglang") is not None:
        print("loading SGLang and its plugins ...", file=sys.stderr)
        found, problem = load_plugins()
    worker, reason = _worker(problem)
    if worker == OURS and target is not None and draft is not None:
        worker, reason = _pair_worker(target, draft)
    return {
        "worker": worker,
        "reason": reason,
        "versions": versions(),
        "machine": hardware(),
        # Of SGLang, which our plugin for CPUs may have set.
        "platform": None if found is None else type(found).__name__,
    }


def _worker(problem: str | None) -> tuple[str, str]:
    """Which worker this installation gives a pair that ours can serve, and why.

    `problem`: why a server of this installation would end at start, or None.
    """
    mismatch = unsupported()
    if _version("sglang") is None:
        return "none", f"{mismatch}; inspect works, and generate if torch is there"
    if problem is not None:
        return "none", f"a server ends at start: {problem}"
    if mismatch is not None:
        return BUILTIN, mismatch
    if not any_in_place(SEAMS):
        return BUILTIN, (
            "our plugin dflash is not loaded: SGLANG_PLUGINS or SGLANG_PLATFORM leaves it out, or "
            "it is not registered; then install the package again"
        )  # fmt: skip
    return OURS, "for drafts of DFlash and DFlash2; add --target and --draft to ask about one pair"


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


def as_text(report: Mapping[str, Any]) -> str:
    """The report for reading."""
    machine = report["machine"]
    of = {
        **report["versions"],
        "processor": f"{machine['processor']}, {machine['cores']} cores",
        "memory": f"{machine['memory_gib']} GiB",
        "accelerator": machine["accelerator"] or "none",
        "platform": report["platform"] or "not known",
    }
    lines = [f"{name:15} {value or 'not installed'}" for name, value in of.items()]
    return "\n".join([f"worker: {report['worker']}", f"why: {report['reason']}", "", *lines])
