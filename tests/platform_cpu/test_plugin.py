"""When the platform is active. (Its plugin entry: tests/engine/test_cpu_plugin.py.)"""

from __future__ import annotations

import pytest
import torch

from sglang_dflash.platform_cpu import PLATFORM, activate


def test_it_activates_only_without_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SGLANG_USE_CPU_ENGINE", raising=False)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert activate() == PLATFORM
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    assert activate() is None
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")
    assert activate() is None


def test_it_does_not_activate_for_another_sglang(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("SGLANG_USE_CPU_ENGINE", raising=False)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr("importlib.metadata.version", lambda _: "0.0.1")
    assert activate() is None
    assert "sglang==0.0.1" in caplog.text and "plain-CPU platform is disabled" in caplog.text
