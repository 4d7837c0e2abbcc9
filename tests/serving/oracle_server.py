"""`sglang.launch_server` whose drafts are known: so many tokens of the true continuation, then wrong ones.

Run with `python -m tests.serving.oracle_server ARGS` and ORACLE naming a JSON file of [prompt ids, output ids] pairs. How many
drafted tokens are right depends on the position, from none to all: batches mix every case, which a real draft does only by chance.
"""

from __future__ import annotations

import json
import os
import runpy
from pathlib import Path
from typing import Any

import torch

if __name__ != "__main__":
    # The scheduler process: SGLang's plugins are loaded, and the worker may be imported.
    from sglang_dflash.serving.worker import DFlashWorker, Step

    known = {tuple(prompt): output for prompt, output in json.loads(Path(os.environ["ORACLE"]).read_text())}
    _propose = DFlashWorker._propose

    def propose(self: DFlashWorker, batch: Any, step: Step) -> torch.Tensor:
        block = _propose(self, batch, step)
        for row, (request, length) in enumerate(zip(batch.reqs, step.seq_lens.tolist(), strict=True)):
            prompt = tuple(request.origin_input_ids)
            text = [*prompt, *known.get(prompt, [])][length + 1 : length + self.block_size]
            right = (7 * length + len(prompt)) % self.block_size
            drafts = [token if i < right else (token + 1) % 1000 for i, token in enumerate(text)]
            block[row, 1 : 1 + len(drafts)] = torch.tensor(drafts, dtype=block.dtype)
        return block

    DFlashWorker._propose = propose  # type: ignore[method-assign]
else:
    runpy.run_module("sglang.launch_server", run_name="__main__")
