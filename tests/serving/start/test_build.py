"""The worker is made from what SGLang gives at each of its three calls, with an extension if one is
named, and serves a step."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

from sglang_dflash.common.errors import ConfigError
from sglang_dflash.drafting import options
from sglang_dflash.drafting.attention import capabilities
from sglang_dflash.drafting.attention.capabilities import Capabilities
from sglang_dflash.drafting.attention.table import RequestSlots
from sglang_dflash.drafting.graphs import GraphedDrafter
from sglang_dflash.drafting.heads.head import TargetHead
from sglang_dflash.drafting.kv.ring import RingKVCache
from sglang_dflash.drafting.ops import TorchOps
from sglang_dflash.drafting.parallel import TensorParallel
from sglang_dflash.memory.draft_memory import NarrowForwards, draft_memory
from sglang_dflash.plugins.platform_cpu.attention import CpuKVPool
from sglang_dflash.serving.start import build, decide
from sglang_dflash.serving.start.build import DFlashSpecWorker
from sglang_dflash.serving.start.flags import ATTRIBUTE
from sglang_dflash.serving.start.plan import Plan
from sglang_dflash.serving.step.extension import Extension, load_extension
from sglang_dflash.serving.step.step import StepObserver
from tests.conftest import random_model
from tests.errors import refused
from tests.recording import OpRecorder
from tests.serving.in_process import (
    COLUMNS,
    HIDDEN,
    ONE_RANK,
    RAW,
    ROWS,
    SLOTS,
    VOCAB,
    Target,
    decode_of,
    prefill_of,
)

HERE = "tests.serving.start.test_build"


class Watching(StepObserver):
    def __init__(self, target_worker: Any) -> None:
        self.target_worker = target_worker


def recorded(target_worker: Any) -> Extension:
    return Extension(recorder=OpRecorder, observer=Watching(target_worker))


def not_an_extension(target_worker: Any) -> int:
    return 3


def broken(target_worker: Any) -> Extension:
    raise AttributeError("of the extension's own code")


@pytest.fixture(autouse=True)
def _one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set values that SGLang has in a scheduler process."""
    embedding = torch.randn(VOCAB, HIDDEN)
    head = TargetHead(lambda ids: embedding[ids], lambda x: x @ embedding.T)
    for name, made in (
        ("target_head", head),
        ("metric_labels", None),
        ("install_late", None),
        ("keep_last_hidden_states", None),
    ):
        monkeypatch.setattr(build, name, lambda *_, made=made: made)
    for name, given in (
        ("table_positions", COLUMNS),
        ("note_reservation", None),
        ("carried_by", 2),
        ("captured_sizes", (2,)),
    ):
        monkeypatch.setattr(build.memory, name, lambda *_, given=given: given)
    monkeypatch.setattr(build, "get_dp_tp_group", lambda: ONE_RANK)
    for name, made in (
        ("tensor_parallel", TensorParallel()),
        ("draft_kv_dtype", torch.float32),
        ("attention_backends_of", {"triton"}),
        ("make_rollback", None),
    ):
        monkeypatch.setattr(decide, name, lambda *_, made=made: made)
    monkeypatch.setattr("sglang_dflash.serving.gpu.graphs.captured_sizes", lambda _most: (2,))


def started(
    kv_tokens: int = SLOTS - 1, allocator: Any = None, role: str = "null", **ours: Any
) -> Any:
    """Return the worker after SGLang's three calls."""
    if allocator is None:
        allocator = SimpleNamespace(size=kv_tokens, size_full=kv_tokens, page_size=1)
    model = random_model(RAW).freeze()
    target: Any = Target(model.config.target_hidden_width, "cpu")
    target.random_seed = 0
    target.model_runner = SimpleNamespace(
        device="cpu",
        dtype=torch.float32,
        model=None,
        sampler=None,
        model_config=SimpleNamespace(context_len=COLUMNS),
    )
    given: Any = SimpleNamespace(
        device="cpu",
        enable_deterministic_inference=False,
        disaggregation_mode=role,
        disaggregation_decode_extra_slots=5,
        enable_hierarchical_cache=False,
        speculative_num_draft_tokens=None,
        speculative_dflash_block_size=None,
        speculative_draft_window_size=7,
        speculative_draft_sink_size=None,
        speculative_draft_attention_backend=None,
        max_running_requests=None,
        # SGLang's default with a draft, or a model's.
        _resolved_overrides=[("default", {"max_running_requests": 2})],
    )
    ours = {"width": "fixed", **ours}
    setattr(given, ATTRIBUTE, {f"speculative_dflash_{k}": v for k, v in ours.items()})
    worker: Any = DFlashSpecWorker(given, target, lambda **_: model)
    table = torch.arange(ROWS * COLUMNS).view(ROWS, COLUMNS).int() + 1
    worker.alloc_memory_pool(
        req_to_token_pool=SimpleNamespace(size=ROWS - 1, req_to_token=table),
        token_to_kv_pool_allocator=allocator,
    )
    worker.init_cuda_graphs()
    return worker


@pytest.mark.parametrize("entries", [60, 1000], ids=["ring", "direct"])
def test_every_slot_has_draft_kv_if_sliding_layers_have_a_pool(entries: int) -> None:
    """A smaller one (gpt-oss, Gemma 4): slots are numbers of the other."""
    sliding = 40
    pool = SWAKVPool(
        SLOTS - 1,
        sliding,
        1,
        torch.float32,
        1,
        8,
        [0],
        [1],
        "cpu",
        token_to_kv_pool_class=CpuKVPool,
    )
    allocator = SWATokenToKVPoolAllocator(
        SLOTS - 1, sliding, 1, torch.float32, "cpu", pool, need_sort=False
    )
    assert allocator.size == sliding
    for _ in range(4):
        slots = allocator.alloc(20)
        allocator.free_swa(slots)
    assert slots.min() > sliding
    worker = started(allocator=allocator, draft_kv_tokens=entries)
    (group,) = worker.dflash.drafter.groups
    assert isinstance(group.cache, RingKVCache) == (entries < SLOTS)
    drafter, table = worker.dflash.drafter, torch.zeros(2, COLUMNS, dtype=torch.int32)
    table[1, : len(slots)] = slots
    width = drafter.model.config.target_hidden_width
    drafter.absorb(torch.randn(len(slots), width), torch.arange(len(slots)), slots)
    requests = RequestSlots(table, torch.tensor([1]), torch.tensor([len(slots)]), len(slots))
    assert drafter.propose(torch.tensor([3]), requests).shape == (1, worker.dflash.verify_block)


def test_rings_are_shared_by_the_requests_that_the_pools_let_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Recurrent states may let fewer run than --max-running-requests, which is 2 here."""
    monkeypatch.setattr(build.memory, "carried_by", lambda _: 1)
    assert started().dflash.carried == 1


def test_pools_without_the_reservation_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draft caches beside them would be memory that nothing was left for."""

    def refuses(_runner: Any) -> int:
        raise RuntimeError("sized without it")

    monkeypatch.setattr(build.memory, "carried_by", refuses)
    monkeypatch.setattr(Plan, "groups", lambda *_: pytest.fail("allocates"))
    with pytest.raises(RuntimeError, match="sized without it"):
        started()


@pytest.mark.parametrize(("role", "rows"), [("null", 3), ("decode", 8)])
def test_every_row_of_the_table_has_its_texts(role: str, rows: int) -> None:
    """On a decode server requests that arrive have rows, too: 5 here."""
    plan = started(role=role)._plan
    steps = plan.step_sizes(10, 0, NarrowForwards())
    looks_up = replace(steps, options=replace(plan.options, looks_up=True))
    assert draft_memory(plan.model.config, looks_up).texts == 4 * rows * 10


@pytest.mark.parametrize("backend", ["torch", "scratch"])
def test_a_prefill_server_has_memory_for_no_draft_steps(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It computes prompts only. (What is left is one request's, for the self-check.)"""
    if backend == "scratch":
        row = decide.ATTENTION["torch"]
        needs_scratch = replace(row, capabilities=replace(row.capabilities, scratch=True))
        monkeypatch.setattr(decide, "ATTENTION", {"torch": needs_scratch})
    flags = {"width": "adaptive", "lookup": "on", "extension": f"{HERE}:recorded"}
    needed, made = {}, {}
    for role in ("null", "prefill"):
        worker = started(role=role, **flags)
        needed[role], made[role] = worker._memory, worker.dflash
    ours, theirs = needed["prefill"], needed["null"]
    for part in ("graph_buffers", "waiting_hidden", "texts", "narrow_widths"):
        assert getattr(ours, part) == 0, part
    assert theirs.waiting_hidden and theirs.texts and theirs.graph_buffers
    for part in ("context_tables", "logits", "activations"):
        assert 0 < getattr(ours, part) < getattr(theirs, part), part
    (ring,), (whole,) = (made[role].drafter.groups for role in ("null", "prefill"))
    assert made["prefill"].lookup is None and made["prefill"].widths.policy.widths == (4,)
    block = made["prefill"].verify_block * (backend == "scratch")
    assert len(whole.cache.kv) - whole.cache.num_entries == 1 + block
    assert len(ring.cache.kv) - ring.cache.num_entries == 1 + 2 * block
    made["prefill"].forward_batch_generation(prefill_of([0, 0], [9, 14]))


def test_the_models_dtype_is_judged_before_the_draft_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuses(dtype: torch.dtype, device: torch.device) -> None:
        raise ConfigError("--dtype", (dtype, device.type))

    monkeypatch.setattr(decide, "check_model_dtype", refuses)
    monkeypatch.setattr(decide, "draft_ops", lambda _: pytest.fail("loads the draft"))
    with pytest.raises(ConfigError) as error:
        started()
    assert error.value.value == (torch.float32, "cpu")


def test_a_backend_that_cannot_read_the_draft_kv_is_not_chosen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    of_fp8 = Capabilities(kv_dtypes=frozenset())
    table = {"first": of_fp8, **capabilities.CAPABILITIES}
    monkeypatch.setattr(capabilities, "CAPABILITIES", table)
    assert started().dflash.figures.report()["draft_attention"] == "torch"


def test_what_a_flashinfer_target_drafts_with_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    started()
    assert "FlashInfer" not in caplog.text
    monkeypatch.setattr(decide, "attention_backends_of", lambda _: {"flashinfer"})
    started()
    assert caplog.text.count("the target attends by FlashInfer, the draft by torch") == 1


@pytest.mark.parametrize("extension", [None, f"{HERE}:recorded"])
def test_a_started_worker_serves(extension: str | None) -> None:
    worker = started(extension=extension, draft_kv_tokens=60)
    lengths = [9, 14]
    worker.forward_batch_generation(prefill_of([0, 0], lengths))
    result = worker.forward_batch_generation(decode_of(lengths))
    assert result.accept_lens.tolist() != [] and result.next_draft_input is not None
    assert worker.block_penalties is worker.dflash.target_tokens.penalties
    drafter, report, observer = worker.dflash.drafter, worker.report(), worker.dflash.observer
    assert getattr(observer, "target_worker", None) is (extension and worker.target_worker)
    assert isinstance(drafter.groups[0].cache, RingKVCache) and report["draft_kv_entries"] == 60
    assert isinstance(drafter, GraphedDrafter) == (extension is not None)
    assert report.get("draft_graph_proposals", 1) == 1
    assert report["decode_steps"] == 1 and report["draft_kv_live_share"] > 0
    worker.clear_cache_pool()
    assert worker.report()["draft_kv_live_share"] == 0


@pytest.mark.parametrize(("width", "recorded"), [("fixed", [4]), ("adaptive", [2, 4])])
def test_narrow_blocks_are_recorded_for_narrow_steps(
    width: str, recorded: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(options, "NARROW_WIDTHS", (1, 2))
    worker = started(width=width, extension=f"{HERE}:recorded")
    assert worker.report()["draft_graph_widths"] == recorded


def test_the_kernel_of_penalties_is_compiled_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the target's vocabulary, and whoever samples. Which penalties a batch has does not matter
    (tests/kernels/test_resources.py)."""
    shapes = []
    note = staticmethod(lambda logits, *_: shapes.append(tuple(logits.shape)))
    monkeypatch.setattr(TorchOps, "penalize", note)
    worker = started()
    assert shapes == [(1, 2, VOCAB)]
    assert worker.block_penalties._ops is worker.draft_model.ops


def test_page_tables_of_whole_blocks_have_room_for_a_step_beyond_the_context() -> None:
    """Those that the target's graphs of whole blocks will have: SGLang captures them next."""

    class FlashAttentionBackend(SimpleNamespace):
        """Named as SGLang's."""

    worker = started()
    attention = FlashAttentionBackend(max_context_len=64, page_size=1, max_num_pages=64)
    worker._target_worker.model_runner.attn_backend = attention
    worker.init_attention_backends()
    room = 64 + 2 * worker.dflash.verify_block
    assert (attention.max_context_len, attention.max_num_pages) == (room, room)


def test_a_pool_without_room_is_refused() -> None:
    """In a scheduler process the same error ends the server (`test_one_line_errors.py`)."""
    with pytest.raises(ConfigError) as error:
        started(kv_tokens=15)
    assert error.value.value == RAW["block_size"]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no_module_here:f", "cannot be imported"),
        (f"{HERE}:gone", "cannot be imported"),
        (HERE, "give MODULE:FUNCTION"),
        (f"{HERE}:not_an_extension", "returned a int, not an Extension"),
    ],
)
def test_what_is_no_extension_is_refused_by_name(path: str, message: str) -> None:
    with refused("extension", path, reason=message):
        load_extension(path, None)


def test_an_error_inside_the_extension_is_its_own() -> None:
    with pytest.raises(AttributeError, match="of the extension's own code"):
        load_extension(f"{HERE}:broken", None)
