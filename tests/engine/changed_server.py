"""`sglang.launch_server` with something of SGLang changed first: CHANGED names a function below.

A module for the nursery to run (see nursery.py): the scheduler process inherits what it changes.
"""

from __future__ import annotations

import os
import runpy
from pathlib import Path
from typing import Any

import psutil

from tests.engine.faults import install as faults
from tests.engine.shown_states import show_states

GIB = 1 << 30


def sized() -> None:
    """A machine that seems to have 16 GiB, all of it free."""
    from sglang.srt.utils import common

    common.get_free_cpu_memory = lambda: 16 * GIB - psutil.Process().memory_info().rss


def of_two_gib() -> None:
    """A machine of which 2 GiB are free, whatever is loaded."""
    from sglang.srt.utils import common

    common.get_free_cpu_memory = lambda: 2 * GIB


def no_penalty_rows() -> None:
    """Remove the patches of serving/step/penalty_counts.py."""
    from sglang_dflash.plugins.repairs import patches as patches
    from sglang_dflash.plugins.repairs import plugin

    kept = tuple(row for row in patches.PATCHES if ".penalty_counts:" not in str(row.ours))
    assert len(kept) == len(patches.PATCHES) - 3
    patches.PATCHES = plugin.PATCHES = kept


def own_grammars() -> None:
    """Add a grammar backend, `own`: XGrammar's grammars, whose masks have a bool per token, and
    which take no token back."""
    from sglang.srt.constrained import base_grammar_backend as base
    from sglang.srt.constrained.xgrammar_backend import XGrammarGrammarBackend
    from sglang.srt.server_args import add_grammar_backend_choices

    from tests.engine.own_grammar import OwnBackend

    def make(server_args: Any, tokenizer: Any, vocab_size: int, eos_token_ids: Any) -> Any:
        theirs = XGrammarGrammarBackend(
            tokenizer, vocab_size, list(eos_token_ids), any_whitespace=False
        )
        return OwnBackend(theirs)

    add_grammar_backend_choices(["own"])
    base.register_grammar_backend("own", make)


def states() -> None:
    """Plain decoding with its recurrent states written to the folder SHOWN after every step."""
    from sglang.srt.managers.tp_worker import TpModelWorker
    from sglang.srt.runtime_context import get_parallel

    folder = Path(os.environ["SHOWN"])
    folder.mkdir(exist_ok=True)
    plain_step = TpModelWorker.forward_batch_generation

    def forward_batch_generation(self: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        result = plain_step(self, batch, *args, **kwargs)
        if batch is not None and batch.forward_mode.is_decode() and get_parallel().tp_rank == 0:
            show_states(folder, batch, batch.seq_lens, self.model_runner)
        return result

    TpModelWorker.forward_batch_generation = forward_batch_generation


def no_containment() -> None:
    """Remove the patches of plugins/repairs/containment.py, and add faults."""
    from sglang_dflash.plugins.repairs import patches as patches
    from sglang_dflash.plugins.repairs import plugin

    kept = tuple(row for row in patches.PATCHES if ".containment:" not in str(row.ours))
    assert len(kept) == len(patches.PATCHES) - 5
    patches.PATCHES = plugin.PATCHES = kept
    faults()


def poisoned_draft_kv() -> None:
    """Draft K/V that nothing has written is NaN, but for the entry of padding, which is masked."""
    from sglang_dflash.drafting import kv

    made = kv.DraftKVCache.__init__

    def poisoned(self: Any, num_entries: int, *args: Any, **kwargs: Any) -> None:
        made(self, num_entries, *args, **kwargs)
        self.kv[:num_entries] = float("nan")

    kv.DraftKVCache.__init__ = poisoned


def four_bit_head() -> None:
    """The target's lm_head has four bits, and a method in place of a product, as quantized
    checkpoints have. No method of SGLang's runs on a CPU."""
    from sglang.srt.model_executor.model_runner import ModelRunner

    from tests.quantized_head import Packed4Bits, quantized

    load_model = ModelRunner.load_model

    def load(self: Any) -> None:
        load_model(self)
        self.model.lm_head = quantized(self.model.lm_head, Packed4Bits())

    ModelRunner.load_model = load


if __name__ == "__main__":
    globals()[os.environ["CHANGED"]]()
    runpy.run_module("sglang.launch_server", run_name="__main__")
