"""The platform's activation, and its registrations. (Its plugin entry:
tests/engine/test_cpu_plugin.py.)"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sglang
import torch

from sglang_dflash.plugins.platform_cpu import PLATFORM, activate


def test_it_activates_only_without_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SGLANG_USE_CPU_ENGINE", raising=False)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert activate() == PLATFORM
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    assert activate() is None
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")
    assert activate() is None


# By file of SGLang: what each of its processes warned of at start, 13 warnings together.
WARNED = {
    "srt/layers/quantization/awq/awq.py": "Only CUDA, HIP and XPU support AWQ currently.",
    "srt/layers/quantization/gguf.py": "Only CUDA, MUSA and NPU support GGUF quantization",
    "kernels/ops/attention/fla/utils.py": "Triton is not supported on current platform",
}


@pytest.mark.parametrize("file", WARNED)
def test_warnings_that_a_user_cannot_act_on_are_not_shown(
    file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert WARNED[file] in Path(sglang.__path__[0], file).read_text()
    monkeypatch.delenv("SGLANG_USE_CPU_ENGINE", raising=False)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        warnings.warn(WARNED[file], UserWarning, stacklevel=1)
        assert len(shown) == 1
        activate()
        warnings.warn(WARNED[file], UserWarning, stacklevel=1)
        assert len(shown) == 1
        warnings.warn("another one", UserWarning, stacklevel=1)
        assert len(shown) == 2


def test_it_does_not_activate_for_another_sglang(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("SGLANG_USE_CPU_ENGINE", raising=False)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr("importlib.metadata.version", lambda _: "0.0.1")
    assert activate() is None
    assert "sglang==0.0.1" in caplog.text and "plain-CPU platform is disabled" in caplog.text


HELP, OTHERS = (
    [["/bin/sglang", "serve", "--help"], ["sglang", "serve", "--model-path", "X", "-h"]],
    [["launch_server.py", "--help"], ["sglang", "serve", "X"], ["sglang", "generate", "-h"]],
)


@pytest.mark.parametrize("argv", HELP + OTHERS, ids=" ".join)
def test_the_help_of_serve_ends_with_our_flags(
    argv: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It does on a GPU, too. (The command: tests/engine/test_as_installed.py.)"""
    at_exit: list[Any] = []
    monkeypatch.setattr(sys, "argv", argv)
    monkeypatch.setattr("atexit.register", at_exit.append)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    assert activate() is None and len(at_exit) == (argv in HELP)
    for show, plugins in [(show, plugins) for show in at_exit for plugins in ("", "dflash_cpu")]:
        monkeypatch.setenv("SGLANG_PLUGINS", plugins)
        show()
        assert ("--speculative-dflash-width" in capsys.readouterr().out) == (plugins == "")


def test_sglangs_kv_canary_watches_our_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """It knows pools by their class, and no subclass."""
    from sglang.kernels.ops.kv_canary.consts import RealKvHashMode
    from sglang.srt.kv_canary.pool_patcher import api

    from sglang_dflash.plugins.platform_cpu.attention import CpuKVPool
    from sglang_dflash.plugins.platform_cpu.platform import PlainCpuPlatform

    known = {kind: attach for kind, attach in api._POOL_ATTACHERS.items() if kind is not CpuKVPool}
    monkeypatch.setattr(api, "_POOL_ATTACHERS", known)
    pool: Any = object.__new__(CpuKVPool)
    pool.k_buffer = pool.v_buffer = [torch.zeros(5, 2, 4)]
    pool.page_size = 1
    given: Any = {
        "config": SimpleNamespace(real_kv_hash_mode=RealKvHashMode.NONE),
        "device": torch.device("cpu"), "kv_token_id_vs_position_offset": 0,
    }  # fmt: skip
    with pytest.raises(NotImplementedError, match="CpuKVPool"):
        api.attach_canary_buffers(pool=pool, **given)
    assert PlainCpuPlatform().get_kv_pool_cls(kind="mha") is CpuKVPool
    (group,) = api.attach_canary_buffers(pool=pool, **given)
    assert len(group.k_head) == 5
