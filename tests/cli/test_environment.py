"""What `sglang-dflash env` knows of an installation."""

from __future__ import annotations

import importlib.metadata
import platform

import pytest
from sglang.srt import plugins as sglang_plugins

from sglang_dflash.cli import environment


@pytest.mark.parametrize("variables", [{}, {"SGLANG_PLUGINS": "dflash"}, {"SGLANG_PLUGINS": " ,"}])
@pytest.mark.parametrize("platform_name", [None, "dflash_cpu", "nonesuch"])
def test_plugins_are_left_out_as_sglang_leaves_them_out(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], platform_name: str | None
) -> None:
    for name in ("SGLANG_PLUGINS", "SGLANG_PLATFORM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    if platform_name is not None:
        monkeypatch.setenv("SGLANG_PLATFORM", platform_name)
    excluded = sglang_plugins._get_excluded_dists()
    monkeypatch.setattr(importlib.metadata.EntryPoint, "load", lambda entry: entry.value)
    theirs = sglang_plugins.load_plugins_by_group(environment.PLUGINS, excluded_dists=excluded)
    ours = [p for p in environment.plugins() if p["group"] == environment.PLUGINS]
    assert {p["name"] for p in ours} >= {"dflash", "dflash_cpu"}
    assert {p["name"] for p in ours if p["left_out"] is None} == set(theirs)
    if platform_name is not None:
        (platform,) = [p for p in environment.plugins() if p["group"] == environment.PLATFORMS]
        left_out = None if platform_name == platform["name"] else "SGLANG_PLATFORM=nonesuch"
        assert platform["left_out"] == left_out


def test_versions_name_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    found = environment.versions()
    assert found["python"] == platform.python_version()
    assert found["sglang"] == importlib.metadata.version("sglang")
    assert None not in (found["sglang-dflash"], found["torch"], found["transformers"])
    real = importlib.metadata.version

    def without_triton(name: str) -> str:
        if name in ("triton", "flash-attn-4"):
            raise importlib.metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(importlib.metadata, "version", without_triton)
    changed = environment.versions()
    assert changed["triton"] is None and "flash-attn-4" not in changed


def test_secrets_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_PLUGINS", "dflash")
    monkeypatch.setenv("SGLANG_API_KEY", "secret")
    monkeypatch.setenv("HF_TOKEN", "secret")
    found = environment.variables()
    assert found["SGLANG_PLUGINS"] == "dflash" and "secret" not in found.values()


def test_the_devices_begin_with_the_processor() -> None:
    first, *others = environment.devices()
    assert " cores, " in first and others
