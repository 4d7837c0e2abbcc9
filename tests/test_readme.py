"""A commit contains no path of a machine and no registry."""

from __future__ import annotations

import re
import subprocess

from tests import ROOT


def test_no_machine_path_and_no_registry_host_is_committed() -> None:
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    binary = (".safetensors", ".png", "tokenizer.json", "prompts.json")
    for name in tracked:
        # The target of a pair may be a link to another pair's folder.
        if name.endswith((*binary, "target")) or name == "tests/test_readme.py":
            continue
        text = (ROOT / name).read_text()
        assert not re.search(
            r"(pypi\.org|files\.pythonhosted|registry\.npmjs|/home/\w|/root/)", text
        ), name
