"""Another plugin that replaces our hook after us."""

from __future__ import annotations

from pathlib import Path

from tests.engine.session import ServerSession

RIVAL = """
from types import SimpleNamespace
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.plugins.hook_registry import HookRegistry, HookSource, HookType
from sglang_dflash.serving.start import choose_worker

target = "sglang.srt.speculative.spec_info.SpeculativeAlgorithm.create_worker"
source = HookSource("rival", "rival")
HookRegistry.register(target, lambda *_: None, HookType.REPLACE, source=source)
HookRegistry.apply_hooks()
worker = SimpleNamespace(model_runner=SimpleNamespace(model=None))
choose_worker.choose_late(
    None, None, server_args=None, gpu_id=0, nccl_port=0, target_worker=worker
)
"""


def test_it_is_found(servers: ServerSession, tmp_path: Path) -> None:
    """Before the worker is built, the process ends and names the row and the other plugin."""
    script = tmp_path / "rival.py"
    script.write_text(RIVAL)
    status, lines = servers.nursery.run(str(script), log=tmp_path / "log")
    assert status == 1
    assert "cannot apply the patch" in lines[-1] and "plugin=rival" in lines[-1], lines
