"""`sglang.launch_server` for tests of recurrent targets: with known drafts, and with the states on show.

A module for the nursery to run (see nursery.py): what it changes is inherited by the scheduler process.

ORACLE: a JSON file of [prompt ids, output ids] pairs. Drafts are then so many tokens of the true continuation and wrong ones after
them; how many depends on the position, from none to all: batches mix every case, which a real draft does only by chance.

SHOWN: a folder. After every decode step the recurrent state of every request, or the first rank's part of it, is written to it, one
file per prompt and committed length; and the accepted lengths of every verify step, one line of JSON per step.

TOO_FEW: replay commits one token too few of every block of which more than one is accepted, to see that the tests would notice.
"""

from __future__ import annotations

import json
import os
import random
import runpy
import zlib
from pathlib import Path
from typing import Any

import torch


def known_drafts(worker: Any, pairs: dict[tuple[int, ...], list[int]]) -> None:
    real = worker._propose

    def propose(self: Any, batch: Any, step: Any) -> torch.Tensor:
        block = real(self, batch, step)
        for row, (request, length) in enumerate(
            zip(batch.reqs, step.seq_lens.tolist(), strict=True)
        ):
            prompt = tuple(request.origin_input_ids)
            text = [*prompt, *pairs.get(prompt, [])][length + 1 : length + self.block_size]
            right = random.Random(1000 * length + len(prompt)).randrange(self.block_size)
            drafts = [token if i < right else (token + 1) % 1000 for i, token in enumerate(text)]
            block[row, 1 : 1 + len(drafts)] = torch.tensor(drafts, dtype=block.dtype)
        return block

    worker._propose = propose


def show_states(folder: Path, batch: Any, lengths: torch.Tensor, model_runner: Any) -> None:
    pool = model_runner.req_to_token_pool
    slots = pool.get_mamba_indices(batch.req_pool_indices.long()).long()
    cache = pool.mamba_pool.mamba_cache
    for request, slot, length in zip(batch.reqs, slots.tolist(), lengths.tolist(), strict=True):
        states = {
            "temporal": cache.temporal[:, slot].clone(),
            "conv": cache.conv[0][:, slot].clone(),
        }
        torch.save(
            states,
            folder / f"{zlib.crc32(str(list(request.origin_input_ids)).encode())}-{length}.pt",
        )


def on_show(folder: Path, tp_worker: Any, worker: Any) -> None:
    from sglang.srt.runtime_context import get_parallel

    plain_step, our_step = tp_worker.forward_batch_generation, worker._decode

    def forward_batch_generation(self: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        result = plain_step(self, batch, *args, **kwargs)
        if batch is not None and batch.forward_mode.is_decode() and get_parallel().tp_rank == 0:
            show_states(folder, batch, batch.seq_lens, self.model_runner)
        return result

    def decode(self: Any, batch: Any, *args: Any) -> Any:
        result = our_step(self, batch, *args)
        if get_parallel().tp_rank > 0:
            return result
        show_states(folder, batch, result.new_seq_lens, self.target_worker.model_runner)
        with (folder / "accepted.jsonl").open("a") as file:
            print(json.dumps(result.accept_lens.tolist()), file=file)
        return result

    tp_worker.forward_batch_generation, worker._decode = forward_batch_generation, decode


def one_too_few(replay: Any) -> None:
    commit = replay.commit
    replay.commit = lambda self, lengths, checkpoints: commit(
        self, (lengths - 1).clamp(min=1), checkpoints
    )


if __name__ == "__main__":
    # In the nursery's fork: the scheduler process is a fork of this one.
    from sglang.srt.managers.tp_worker import TpModelWorker

    from sglang_dflash.serving.recurrent import Replay
    from sglang_dflash.serving.worker import DFlashWorker

    if "TOO_FEW" in os.environ:
        one_too_few(Replay)
    if "ORACLE" in os.environ:
        known_drafts(
            DFlashWorker,
            {
                tuple(prompt): output
                for prompt, output in json.loads(Path(os.environ["ORACLE"]).read_text())
            },
        )
    on_show(Path(os.environ["SHOWN"]), TpModelWorker, DFlashWorker)
    runpy.run_module("sglang.launch_server", run_name="__main__")
