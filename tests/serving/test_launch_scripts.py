"""launch/serve_*.sh: each is a published command that takes other models and more arguments."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.serving.published import (
    ASKED,
    LAUNCH,
    MODELS,
    SCRIPTS,
    WINDOW,
    flags,
    local,
    needs_plain_cpu,
    on_this_machine,
    resolved_fields,
)


def run_script(
    name: str, *arguments: str, tmp_path: Path, **environment: str
) -> tuple[list[str], dict[str, str]]:
    """What the script hands to Python, and the variables that it exports."""
    show = tmp_path / "python"
    show.write_text('#!/usr/bin/env bash\nenv > "$(dirname "$0")/env"\nprintf "%s\\n" "$@"\n')
    show.chmod(0o755)
    before = {**os.environ, "PYTHON": str(show), **environment}
    script = str(LAUNCH / f"serve_{name}.sh")
    shown = subprocess.run(
        ["bash", script, *arguments], env=before, capture_output=True, text=True, check=True
    ).stdout
    after = dict(
        line.split("=", 1)
        for line in (tmp_path / "env").read_text().splitlines()
        if line.startswith("SGLANG_")
    )
    return shown.splitlines(), {k: v for k, v in after.items() if before.get(k) != v}


def test_there_is_a_script_for_every_command() -> None:
    assert {path.stem for path in LAUNCH.glob("serve_*.sh")} == {
        f"serve_{name}" for name in SCRIPTS
    }


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_is_its_published_command(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("TARGET", "DRAFT", "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"):
        monkeypatch.delenv(variable, raising=False)
    subprocess.run(["bash", "-n", str(LAUNCH / f"serve_{name}.sh")], check=True)
    words, exported = run_script(name, tmp_path=tmp_path)
    assert words == ["-m", "sglang.launch_server", *flags(SCRIPTS[name])]
    assert exported == (
        {"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"} if name == "qwen3.5-35b-a3b" else {}
    )


@needs_plain_cpu
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_takes_models_and_arguments_and_resolves(
    name: str, resolve: Any, folders: Any, tmp_path: Path
) -> None:
    at_home = local(flags(SCRIPTS[name]), folders)
    target, draft = (at_home[at_home.index(flag) + 1] for flag in MODELS)
    words, _ = run_script(
        name,
        *WINDOW,
        "--served-model-name",
        "two words",
        tmp_path=tmp_path,
        TARGET=target,
        DRAFT=draft,
    )
    assert words[2:] == [*at_home, *WINDOW, "--served-model-name", "two words"]
    fields = resolved_fields(resolve(on_this_machine(words[2:])))
    assert fields == {**ASKED, "mamba_radix_cache_strategy": fields["mamba_radix_cache_strategy"]}
