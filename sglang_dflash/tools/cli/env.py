"""`sglang-dflash env`. It also works without SGLang, and with an unsupported release."""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Mapping
from typing import Any

from sglang_dflash.common.machine import hardware, version
from sglang_dflash.patches.patch import any_in_place, load_plugins
from sglang_dflash.patches.version import unsupported
from sglang_dflash.serving.metrics.server_info import OURS
from sglang_dflash.serving.patches import PATCHES
from sglang_dflash.tools.cli import changes

SGLANG_WORKER = "SGLang's built-in worker"


def arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--json", action="store_true", help="print one JSON object")
    add("--changes", action="store_true", help="every change to SGLang, and its reason, instead")


def run(args: argparse.Namespace) -> None:
    if args.changes:
        output = json.dumps({"changes": changes.as_rows()}) if args.json else changes.as_text()
        print(output)
        return
    sglang_platform, problem = None, None
    if version("sglang") is not None:
        print("loading SGLang and its plugins ...", file=sys.stderr)
        sglang_platform, problem = load_plugins()
    worker, reason = _worker(problem, sglang_platform)
    packages = ("sglang-dflash", "sglang", "torch", "triton", "transformers", "huggingface_hub")
    report = {
        "worker": worker,
        "reason": reason,
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in packages},
            "system": platform.platform(),
        },
        "machine": hardware(),
        # SGLang's platform object, which may be our plugin's.
        "platform": None if sglang_platform is None else type(sglang_platform).__name__,
    }
    print(json.dumps(report) if args.json else as_text(report))


def _worker(problem: str | None, sglang_platform: Any) -> tuple[str, str]:
    """Return the worker that this installation takes for a pair that ours can serve, and why.

    Args:
        problem: the reason why a server would end at start, or None.
        sglang_platform: SGLang's platform object; None if it is not known.
    """
    mismatch = unsupported()
    if version("sglang") is None:
        return "none", f"{mismatch}; inspect works, and generate if torch is there"
    if problem is not None:
        return "none", f"a server ends at start: {problem}"
    if mismatch is not None:
        return SGLANG_WORKER, mismatch
    if not any_in_place(PATCHES):
        return SGLANG_WORKER, (
            "our plugin dflash is not loaded: SGLANG_PLUGINS or SGLANG_PLATFORM leaves it out, or "
            "it is not registered; then install the package again"
        )  # fmt: skip
    if sglang_platform is not None and not _can_draft(sglang_platform):
        return "none", (
            "a server with a draft ends at start: there is no accelerator, and our plugin "
            "dflash_cpu is not loaded: SGLANG_PLUGINS, SGLANG_PLATFORM or "
            "SGLANG_USE_CPU_ENGINE=1 leaves it out"
        )
    return OURS, "installed and loaded; `sglang-dflash inspect TARGET DRAFT` tells of a pair"


def _can_draft(sglang_platform: Any) -> bool:
    """Return whether SGLang serves drafts there. Without an accelerator its own platform does
    not."""
    import torch

    return torch.accelerator.is_available() or sglang_platform.is_out_of_tree()


def as_text(report: Mapping[str, Any]) -> str:
    """Format the report."""
    machine = report["machine"]
    facts = {
        **report["versions"],
        "processor": f"{machine['processor']}, {machine['cores']} cores",
        "memory": f"{machine['memory_gib']} GiB",
        "accelerator": machine["accelerator"] or "none",
        "platform": report["platform"] or "not known",
    }
    lines = [f"{name:15} {value or 'not installed'}" for name, value in facts.items()]
    return "\n".join([f"worker: {report['worker']}", f"why: {report['reason']}", "", *lines])
