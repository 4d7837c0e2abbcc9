"""An extension of our worker: the target's attention backend needs no lengths on the host, so that
SGLang copies none to it, as with FlashAttention on a GPU."""

from __future__ import annotations

from typing import Any

from sglang_dflash.serving.step.extension import Extension, Step, StepObserver


class NoHostLengths(StepObserver):
    def before_step(self, batch: Any, step: Step) -> None:
        assert batch.seq_lens_cpu is None and batch.seq_lens_sum is None


def extension(target_worker: Any) -> Extension:
    from sglang_dflash.platform_cpu.attention import CpuAttentionBackend

    del target_worker
    CpuAttentionBackend.needs_cpu_seq_lens = False
    return Extension(observer=NoHostLengths())
