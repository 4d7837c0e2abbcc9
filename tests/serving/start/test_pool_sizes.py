"""A server's pools are what `inspect` says, to the token and the state, by SGLang's own sizing.

The demo pairs, in bfloat16 on a GPU of some MiB: SGLang resolves the flags and sizes the pools, our
patches are around it, and only the memory that is free is made up.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.mem_cache import kv_cache_configurator as theirs
from sglang.srt.model_executor.model_runner_components.spec_aux_hidden_state import (
    SpecAuxHiddenStateConfig,
)
from sglang.srt.runtime_context import get_schedule, get_spec, publish, reset_context
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from sglang_dflash.checkpoint.draft_config import DraftConfig
from sglang_dflash.drafting.options import Options
from sglang_dflash.memory.draft_memory import default_captures
from sglang_dflash.memory.pools import sglang_states
from sglang_dflash.serving.gpu.backends import ATTENTION
from sglang_dflash.serving.metrics.server_info import BUILTIN
from sglang_dflash.serving.start import memory
from sglang_dflash.serving.start.plan import Plan
from sglang_dflash.tools.demo_pairs.pairs import demo_pair
from sglang_dflash.tools.gpu_check.drafters import random_model
from tests.patches.originals import original
from tests.tools.inspect.pairs import inspected

GIB = 2**30
SIZING = "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator"
REPLAYS: Any = SimpleNamespace(name="replay")


class Sized(theirs.KVCacheConfigurator):
    """SGLang's, with the patches of our worker."""

    def _handle_max_mamba_cache(self, total_rest_memory: float) -> float:
        sized = original(f"{SIZING}._handle_max_mamba_cache")
        if memory.reservation_of(self) is None:
            # The patch is not installed then.
            return sized(self, total_rest_memory)
        return memory.size_state_pool(sized, self, total_rest_memory)

    def config_from_budget(self, budget_bytes: int, **others: Any) -> Any:
        sized = original(f"{SIZING}.config_from_budget")
        return memory.pool_config(sized, self, budget_bytes, **others)


@pytest.fixture(autouse=True)
def _one_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("sglang_dflash.serving.start.plan.processors_of", lambda _: 132)
    monkeypatch.setattr(memory, "captured_sizes", default_captures)
    yield
    reset_context()


def configurator_of(kind: str, worker: str, flags: Sequence[str]) -> Sized:
    """Return the configurator of a server that was started with these flags.

    Args:
        kind: of a demo pair.
        worker: `ours`, `builtin` or `plain`.
    """
    pair, drafts = demo_pair(kind), worker != "plain"
    draft = ["--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", str(pair.draft)]
    kept = ["--mamba-radix-cache-strategy", "extra_buffer"] if kind == "hybrid" else []
    # `prepare_server_args` would replace the handlers of this process's log.
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    argv = [
        "--model-path", str(pair.target), "--dtype", "bfloat16", "--device", "cpu",
        *kept, *(draft if drafts else ()), *flags,
    ]  # fmt: skip
    args = ServerArgs.from_cli_args(parser.parse_args(argv))
    args.resolve_once()
    # On a CPU, SGLang schedules without overlap, and counts a state less for each request.
    publish(args, role="scheduler").override("a GPU's", disable_overlap_schedule=False)
    target = ModelConfig.from_server_args(args)
    layers = SimpleNamespace(
        start_layer=0, end_layer=target.num_hidden_layers,
        num_effective_layers=target.num_hidden_layers, is_hybrid_swa_mtp_draft=False,
        swa_attention_layer_ids=None,
    )  # fmt: skip
    aux = SpecAuxHiddenStateConfig()
    if drafts:
        own = ModelConfig(str(pair.draft), is_draft_model=True, dtype="bfloat16")
        aux = SpecAuxHiddenStateConfig(
            draft_model_config=own, dflash_draft_num_layers=own.num_hidden_layers
        )
    runner = SimpleNamespace(spec_aux_config=aux)
    if worker == "ours":
        memory.note_reservation(runner, memory.draft_reservation(plan_of(kind), target))
    return Sized(
        device="cuda", gpu_id=0, attn_dp_size=1, pp_size=1, pp_group=None, model=None,
        model_config=target, server_args=args, kv_cache_dtype=torch.bfloat16,
        model_dtype=torch.bfloat16, page_size=1, sliding_window_size=None,
        spec_algorithm=SpeculativeAlgorithm.from_string("DFLASH" if drafts else None),
        is_draft_worker=False, post_capture_kv_active=False,
        spec_aux_config=runner.spec_aux_config, is_hybrid_swa=False, is_hybrid_swa_compress=False,
        use_mla_backend=False, layer_info=layers, forward_stream=None, req_to_token_pool=None,
        token_to_kv_pool_allocator=None, memory_pool_config=None, kv_cache_dtype_str="auto",
    )  # fmt: skip


def plan_of(kind: str) -> Plan:
    """Our worker's, on an H100."""
    config = DraftConfig.from_pretrained(demo_pair(kind).draft)
    given = Options(window=get_spec().speculative_draft_window_size).resolve(config)
    model = random_model(config, torch.device("cpu"), torch.bfloat16)
    running, rollback = get_schedule().max_running_requests, REPLAYS if kind == "hybrid" else None
    plan = Plan.of_draft(model, given, "triton", ATTENTION["triton"], running)
    cuda = torch.device("cuda")
    return replace(plan, device=cuda, recorder=SimpleNamespace, rollback=rollback)


def pools(kind: str, worker: str, free: int, flags: Sequence[str]) -> dict[str, Any]:
    """Return the pools that a server allocates in `free` bytes, which its weights leave."""
    sized = configurator_of(kind, worker, flags)
    left = free / GIB
    if sized.mambaish_config is not None:
        left = sized._handle_max_mamba_cache(left)
    tokens = sized.config_from_budget(int(left * GIB)).max_total_num_tokens
    reserved = memory.reservation_of(sized)
    rings = [] if reserved is None else reserved.draft_kv(reserved.carried)
    return {
        "recurrent_slots": get_schedule().max_mamba_cache_size,
        "running_requests": sized.resolve_max_num_reqs(tokens),
        "target_tokens": tokens,
        "entries": [group.entries(tokens) or tokens for group in rings],
    }


PAIRS, CARDS, REQUESTS = ("hybrid", "dense"), ("0.06", "0.6", "4"), ("2", "48")


@pytest.mark.parametrize("window", ["", "64", "2048"])
@pytest.mark.parametrize(("kind", "gib", "requests"), product(PAIRS, CARDS, REQUESTS))
def test_our_worker_has_the_pools_of_inspect(
    kind: str, gib: str, requests: str, window: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--max-running-requests", requests]
    flags += ["--speculative-draft-window-size", window] if window else []
    report = of_inspect(capsys, kind, gib, *flags)
    found = pools(kind, "ours", left(report, gib, "target", "draft"), flags)
    entries = [group["entries"] for group in report["draft_kv_groups"]]
    assert found == {**{name: report[name] for name in found if name in report}, "entries": entries}
    # Never fewer requests than by SGLang's split, and never fewer tokens.
    reset_context()
    by_ratio = pools(
        kind, "ours", left(report, gib, "target", "draft"),
        [*flags, *(["--mamba-full-memory-ratio", "0.9"] if kind == "hybrid" else [])],
    )  # fmt: skip
    assert found["running_requests"] == by_ratio["running_requests"]
    assert found["target_tokens"] >= by_ratio["target_tokens"]
    if kind == "hybrid":
        free, state = left(report, gib, "target", "draft"), report["recurrent_state_bytes"]
        replay = (int(requests) + 1) * report["recurrent_replay_bytes"]
        assert by_ratio["recurrent_slots"] == sglang_states(free - replay, state)
        assert (found["running_requests"] < int(requests)) == (gib == "0.06" and requests == "48")


@pytest.mark.parametrize(("kind", "gib", "requests"), product(PAIRS, CARDS, REQUESTS))
def test_sglangs_worker_and_plain_servers_have_them_too(
    kind: str, gib: str, requests: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--max-running-requests", requests]
    report = of_inspect(capsys, kind, gib, *flags, "--speculative-dflash-worker", "builtin")
    assert report["worker"] == BUILTIN
    found = pools(kind, "builtin", left(report, gib, "target", "draft"), flags)
    assert found == {**{name: report[name] for name in found if name in report}, "entries": []}
    reset_context()
    plain = pools(kind, "plain", left(report, gib, "target"), flags)
    assert plain["target_tokens"] == report["target_tokens_without_draft"]


def of_inspect(
    capsys: pytest.CaptureFixture[str], kind: str, gib: str, *flags: str
) -> dict[str, Any]:
    """The report of a server that is started with these flags."""
    pair = demo_pair(kind)
    given = ("--speculative-draft-model-path", str(pair.draft), "--mem-fraction-static", "1")
    launch = ("--model-path", str(pair.target), "--speculative-algorithm", "DFLASH", *given)
    return inspected(capsys, "--memory-gib", gib, "--", *launch, *flags)


def left(report: dict[str, Any], gib: str, *loaded: str) -> int:
    """Bytes of the card that these weights leave."""
    return int(float(gib) * GIB) - sum(report[f"{each}_weight_bytes"] for each in loaded)
