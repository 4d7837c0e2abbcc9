"""An extension of our worker: the drafter's steps are replayed from lists of torch operations, the
path of CUDA graphs on a CPU."""

from __future__ import annotations

from typing import Any

from sglang_dflash.serving.step.extension import Extension
from tests.recording import OpRecorder


def extension(_target_worker: Any) -> Extension:
    return Extension(recorder=OpRecorder)
