"""`sglang.launch_server` without speculation, with its recurrent states on show.

A module for the nursery to run (see nursery.py): the scheduler process inherits what it changes.

SHOWN: the folder to which the states are written after every decode step (see shown_states.py).
"""

from __future__ import annotations

import os
import runpy
from pathlib import Path
from typing import Any

from tests.engine.shown_states import show_states


def put_states_on_show(tp_worker: Any, folder: Path) -> None:
    from sglang.srt.runtime_context import get_parallel

    plain_step = tp_worker.forward_batch_generation

    def forward_batch_generation(self: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        result = plain_step(self, batch, *args, **kwargs)
        if batch is not None and batch.forward_mode.is_decode() and get_parallel().tp_rank == 0:
            show_states(folder, batch, batch.seq_lens, self.model_runner)
        return result

    tp_worker.forward_batch_generation = forward_batch_generation


if __name__ == "__main__":
    from sglang.srt.managers.tp_worker import TpModelWorker

    shown = Path(os.environ["SHOWN"])
    shown.mkdir(exist_ok=True)
    put_states_on_show(TpModelWorker, shown)
    runpy.run_module("sglang.launch_server", run_name="__main__")
