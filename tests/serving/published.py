"""The launch commands of the model cards, and what they resolve to."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang_dflash.drafting.weights import save_model
from sglang_dflash.tools.demo_pairs.pairs import demo_pair
from tests.conftest import random_model, raw_config, with_own
from tests.engine.hybrid import config_of, copy_tokenizer

LINE = """python -m sglang.launch_server --model-path Qwen/Qwen3.5-27B \\
    --speculative-algorithm DFLASH --speculative-draft-model-path z-lab/Qwen3.5-27B-DFlash \\
    --speculative-num-draft-tokens 16 --tp-size 1 --attention-backend fa3 \\
    --mem-fraction-static 0.75 --mamba-scheduler-strategy extra_buffer --trust-remote-code"""
BLACKWELL = "--attention-backend trtllm_mha --speculative-draft-attention-backend fa4"
PUBLISHED = {
    "qwen3.5-27b": LINE,
    "qwen3.5-35b-a3b": LINE.replace("Qwen3.5-27B", "Qwen3.5-35B-A3B").replace(
        "--attention-backend fa3", BLACKWELL
    ),
    "qwen3.6-27b": LINE.replace("Qwen3.5-27B", "Qwen3.6-27B"),
    "qwen3.6-35b-a3b": LINE.replace("Qwen3.5-27B", "Qwen3.6-35B-A3B"),
}
# Not published: the first command without what is for recurrent layers.
QWEN3 = LINE.replace("Qwen3.5-27B-DFlash", "Qwen3-8B-DFlash-b16").replace("Qwen3.5-27B", "Qwen3-8B")
COMMANDS = {**PUBLISHED, "qwen3-8b": QWEN3.replace("--mamba-scheduler-strategy extra_buffer ", "")}
WINDOW = ["--speculative-dflash-draft-window-size", "4096"]
MODELS = ("--model-path", "--speculative-draft-model-path")
BACKEND_FLAGS = ("--attention-backend", "--speculative-draft-attention-backend")


def flags(command: str) -> list[str]:
    return shlex.split(command.replace("\\\n", " "))[3:]


def with_values(argv: list[str], **values: str) -> list[str]:
    """`argv` with the values of those flags replaced that it has."""
    of = {f"--{name.replace('_', '-')}": value for name, value in values.items()}
    return [of.get(before, word) for before, word in zip(["", *argv], argv, strict=False)]


def tiny_checkpoints(root: Path) -> dict[str, str]:
    """Write tiny checkpoints of the published architectures, dense and with experts, and a draft.

    Returns their folders by name, and those of the demo pair, a dense Qwen3.
    """
    names = {"27b": "Qwen3_5", "a3b": "Qwen3_5Moe"}
    for name, kind in names.items():
        config_of(kind).save_pretrained(root / name)
        copy_tokenizer(root / name)
    # Made for half the positions of the targets, since published drafts are made for fewer too.
    sizes = {"hidden_size": 64, "vocab_size": 1024, "num_target_layers": 4, "block_size": 16}
    raw = raw_config(**sizes, **with_own(target_layer_ids=[1, 2]))
    save_model(random_model(raw), raw, root / "draft", torch.float32)
    dense = demo_pair("dense")
    return {
        **{name: str(root / name) for name in (*names, "draft")},
        "8b": str(dense.target),
        "8b-draft": str(dense.draft),
    }


def local(argv: list[str], folders: dict[str, str]) -> list[str]:
    """`argv` with its two model paths replaced, and nothing else."""
    kind = argv[argv.index("--model-path") + 1].lower().rsplit("-", 1)[-1]
    return with_values(
        argv,
        model_path=folders[kind],
        speculative_draft_model_path=folders["8b-draft" if kind == "8b" else "draft"],
    )


def on_this_machine(argv: list[str]) -> list[str]:
    """`argv` with the backends that a plain CPU has."""
    return with_values(
        argv, attention_backend="torch_native", speculative_draft_attention_backend="torch_native"
    )


def serving(server_args: Any) -> str:
    """Return the worker that SGLang would make: "ours" or "builtin"."""
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    worker = SpeculativeAlgorithm.DFLASH.create_worker(server_args)
    return "builtin" if hasattr(worker, "builtin_reason") else "ours"


ASKED = {
    "speculative_algorithm": "DFLASH",
    "speculative_num_draft_tokens": 16,
    "tp_size": 1,
    "mem_fraction_static": 0.75,
    "mamba_radix_cache_strategy": "extra_buffer",
    "trust_remote_code": True,
    "speculative_draft_window_size": 4096,
    "disable_overlap_schedule": False,
}


def resolved_fields(server_args: Any) -> dict[str, Any]:
    from sglang.srt.arg_groups.overrides import resolving_view

    settings = resolving_view(server_args)
    return {name: getattr(settings, name) for name in ASKED}


class Arrived:
    """Resolved settings, some of them as they arrive on a machine that is not here."""

    def __init__(self, settings: Any, changes: Mapping[str, Any]) -> None:
        self._settings, self._changes = settings, changes

    def __getattr__(self, name: str) -> Any:
        return self._changes.get(name, getattr(self._settings, name))


needs_plain_cpu = pytest.mark.skipif(
    torch.cuda.is_available(), reason="this machine has the published backends"
)
