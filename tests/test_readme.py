"""Flags that the pages name, and what a commit must not contain."""

from __future__ import annotations

import argparse
import re
import subprocess

import pytest

from tests import ROOT

README = (ROOT / "README.md").read_text()
PAGES = [README, *(path.read_text() for path in sorted((ROOT / "docs").glob("*.md")))]


@pytest.mark.engine
def test_every_flag_that_is_named_is_a_flag() -> None:
    """Flags are the server's, our commands', or those of programs in launch/ and experiments/."""
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import ServerArgs

    load_plugins()
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    shown = parser.format_help()
    homes = ("sglang_dflash", "experiments", "launch")
    sources = [path for home in homes for path in (ROOT / home).rglob("*.py")]
    ours = "\n".join(path.read_text() for path in sources)
    flags = {
        flag
        for text in PAGES
        for flag in re.findall(r"`(--[a-z][a-z0-9-]*[a-z0-9])(?![a-z0-9-])", text)
    }
    assert len(flags) > 20
    for flag in flags:
        field = flag.removeprefix("--").replace("-", "_")
        is_ours = re.search(rf'"(--[a-z-]+ )?{flag}[ "]|^    {field}: .+ = setting\(', ours, re.M)
        assert is_ours or re.search(rf"{flag}[\s,\]]", shown), flag


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
