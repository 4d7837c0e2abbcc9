"""SGLang's sizing of the target's pool with our reservation: arithmetic on made-up sizes."""

from __future__ import annotations

import inspect
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.model_executor.model_runner_components.spec_aux_hidden_state import (
    SpecAuxHiddenStateConfig,
)
from sglang.srt.model_executor.pool_configurator import _dflash_draft_cell_size
from sglang.srt.speculative.dflash_utils import scale_kv_cell_size_per_token_for_dflash
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from sglang_dflash.checkpoint.draft_config import DraftConfig
from sglang_dflash.drafting.options import Options
from sglang_dflash.memory.draft_memory import DraftMemory, headroom
from sglang_dflash.memory.sizes import GroupKVSize
from sglang_dflash.serving.start import memory
from sglang_dflash.serving.start.memory import (
    DraftReservation,
    note_reservation,
    pool_config,
    reservation_of,
    table_headroom,
)
from tests.conftest import raw_config
from tests.errors import refused

TARGET, DRAFT, MEMORY = 1000, 250, 10_000_000
RUNNING, NOTHING = 8, DraftMemory()


def runner_with(reservation: DraftReservation | None, is_draft_worker: bool = False) -> Any:
    """A target runner whose configurator got SGLang's description of the draft, ours in
    it."""
    described = SpecAuxHiddenStateConfig(dflash_draft_num_layers=1, dflash_target_layer_ids=[1, 2])
    runner = SimpleNamespace(spec_aux_config=described)
    if reservation is not None:
        note_reservation(runner, reservation)
    runner.kv_cache_configurator = SimpleNamespace(
        is_draft_worker=is_draft_worker,
        spec_algorithm=SpeculativeAlgorithm.DFLASH,
        spec_aux_config=runner.spec_aux_config,
        dflash_draft_cell_size_per_token=DRAFT,
        mambaish_config=None,
        attn_dp_size=1,
        model_config=SimpleNamespace(context_len=2048),
        post_capture_kv_active=False,
    )
    return runner


def reserving(*groups: GroupKVSize, needed: DraftMemory = NOTHING) -> DraftReservation:
    """A reservation whose rings do not depend on the requests."""
    return DraftReservation(lambda _: groups, RUNNING, needed=needed)


def sglang_sizing(configurator: Any, budget_bytes: int) -> Any:
    """Size pools as `MHAPoolConfigurator` does, by its functions: bytes per token, then tokens."""
    layers, cell = configurator.spec_aux_config.dflash_draft_num_layers, TARGET
    if layers:
        cell = scale_kv_cell_size_per_token_for_dflash(
            target_cell_size_per_token=TARGET,
            target_num_layers=4,
            draft_num_layers=layers,
            draft_cell_size_per_token=_dflash_draft_cell_size(configurator) or None,
        )
    return SimpleNamespace(max_total_num_tokens=budget_bytes // cell)


@pytest.fixture(autouse=True)
def _one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.model_executor import pool_configurator

    monkeypatch.setattr(pool_configurator, "get_parallel", lambda: SimpleNamespace(attn_dcp_size=1))
    schedule = SimpleNamespace(max_running_requests=RUNNING, max_total_tokens=None)
    monkeypatch.setattr(memory, "get_schedule", lambda: schedule)
    monkeypatch.setattr(memory, "get_alloc_reserve_per_decode", lambda: 32)


def tokens(runner: Any, budget_bytes: int = MEMORY) -> int:
    sized = pool_config(sglang_sizing, runner.kv_cache_configurator, budget_bytes)
    return sized.max_total_num_tokens


NEEDED = DraftMemory(logits=1_000_000)
# Entries of 250 bytes have tags of 5, and each target token one of 4.
RING = GroupKVSize(DRAFT, 2_000)
WITH_RING = (MEMORY - 2_000 * 255) // (TARGET + 4)
# Groups of draft layers -> target tokens, and entries of their caches. A ring leaves more tokens,
# unless it would take as many bytes as an entry per token.
SIZED: list[tuple[tuple[GroupKVSize, ...], int, list[int | None]]] = [
    ((GroupKVSize(DRAFT, None),), 8_000, [None]),
    ((RING,), WITH_RING, [2_000]),
    # Fewer entries than tokens, but for their tags a ring would take more bytes.
    ((GroupKVSize(DRAFT, 7_999),), 8_000, [None]),
    ((GroupKVSize(DRAFT, 8_400),), 8_000, [None]),
    ((GroupKVSize(DRAFT, 80_000),), 8_000, [None]),
    (
        (GroupKVSize(200, 2_000), GroupKVSize(50, None)),
        (MEMORY - 2_000 * 205) // 1_054,
        [2_000, None],
    ),
    (
        (GroupKVSize(200, 9_000), GroupKVSize(50, 1_000)),
        (MEMORY - 1_000 * 55) // 1_204,
        [None, 1_000],
    ),
    (
        (GroupKVSize(200, 2_000), GroupKVSize(50, 1_000)),
        (MEMORY - 465_000) // 1_008,
        [2_000, 1_000],
    ),
]


@pytest.mark.parametrize(("groups", "expected", "entries"), SIZED)
def test_rings_leave_the_target_more_tokens(
    groups: tuple[GroupKVSize, ...], expected: int, entries: list[int | None]
) -> None:
    runner = runner_with(reserving(*groups))
    # Without the row, SGLang's sizing alone.
    assert sglang_sizing(runner.kv_cache_configurator, MEMORY).max_total_num_tokens == 8_000
    assert tokens(runner) == expected
    assert [group.entries(expected) for group in groups] == entries
    kept = runner.kv_cache_configurator
    assert kept.spec_aux_config.dflash_target_layer_ids == [1, 2]
    # What is taken is what is allocated, and no token more would fit.
    taken = [
        expected * (TARGET + sum(g.token_bytes for g in groups if g.entries(expected) is None)),
        *(g.ring * (g.token_bytes + 5) + 4 * expected for g in groups if g.entries(expected)),
    ]
    assert MEMORY - 1_500 < sum(taken) <= MEMORY
    # The second sizing, after graphs were captured, finds less memory free by the draft K/V.
    assert tokens(runner, expected * TARGET) == expected


@pytest.mark.parametrize("reservation", [None, reserving(RING)], ids=["other", "draft"])
def test_a_runner_that_our_worker_does_not_serve_is_sized_by_sglang(
    reservation: DraftReservation | None,
) -> None:
    """Another worker's, and a draft's."""
    runner = runner_with(reservation, is_draft_worker=reservation is not None)
    assert tokens(runner) == 8_000 and reservation_of(runner.kv_cache_configurator) is None


def test_a_lost_reservation_ends_the_start() -> None:
    """SGLang's sizing saw a description of its own making, in place of ours."""
    runner = runner_with(reserving(RING))
    configurator = runner.kv_cache_configurator
    with pytest.raises(RuntimeError, match="without the drafter's memory"):
        memory.carried_by(runner)  # It has not sized yet.
    tokens(runner)
    assert memory.carried_by(runner) == RUNNING
    configurator.spec_aux_config = SpecAuxHiddenStateConfig(dflash_draft_num_layers=1)
    tokens(runner)
    for use in (lambda: memory.carried_by(runner), lambda: memory.note_eager_steps(configurator)):
        with pytest.raises(RuntimeError, match="did not reach `KVCacheConfigurator"):
            use()


def test_what_is_needed_beside_is_left_free() -> None:
    assert tokens(runner_with(reserving(GroupKVSize(DRAFT, None), needed=NEEDED))) == 7_200
    assert tokens(runner_with(reserving(RING, needed=NEEDED))) == (
        (MEMORY - 1_000_000 - 2_000 * 255) // 1_004
    )


def test_what_is_allocated_is_not_left_free_again() -> None:
    """After graphs were captured, only what eager steps will need is missing."""
    needed = DraftMemory(context_tables=750_000, logits=150_000, activations=100_000)
    runner = runner_with(reserving(GroupKVSize(DRAFT, None), needed=needed))
    assert tokens(runner) == 7_200
    assert tokens(runner, 7_200_000) == 6_950


@pytest.mark.parametrize("reserved", [MEMORY, MEMORY + 1])
def test_no_room_for_the_drafter_is_refused(reserved: int) -> None:
    runner = runner_with(reserving(GroupKVSize(DRAFT, None), needed=DraftMemory(logits=reserved)))
    with refused("--mem-fraction-static"):
        tokens(runner)


@pytest.mark.parametrize(("page", "columns"), [(1, 33), (64, 96)])
def test_a_table_row_holds_what_is_reserved(
    page: int, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two blocks and a bonus token ahead of the committed tokens, up to a page boundary."""
    from sglang.srt.mem_cache import allocation_sizing as sizing

    spec = SimpleNamespace(
        speculative_algorithm="DFLASH", speculative_num_steps=1, speculative_eagle_topk=1
    )
    for module in (sizing, memory):
        monkeypatch.setattr(module, "get_spec", lambda: spec)
    monkeypatch.setattr(sizing, "get_schedule", lambda: SimpleNamespace(page_size=page))
    monkeypatch.setattr(sizing, "get_parallel", lambda: SimpleNamespace(attn_dcp_size=1))
    monkeypatch.setattr(sizing, "max_speculative_num_draft_tokens", lambda: 16)
    original = inspect.unwrap(sizing.get_req_to_token_extra_context_len)
    assert original() == (20 if page == 1 else 95)
    assert table_headroom(original) == columns
    assert page > 1 or headroom(16) == columns
    # SGLang ends a request two tokens before the limit; its newest token has no KV yet.
    context = 1000
    request = SimpleNamespace(kv=SimpleNamespace(kv_allocated_len=0, kv_committed_len=context - 4))
    _, (reserved,), _ = sizing.page_aligned_decode_alloc_lens([request], reserve=33, page_size=page)
    assert reserved <= context + columns
    assert (reserved > context + original()) is (page == 1)
    spec.speculative_algorithm = None
    assert table_headroom(original) == original() == 20


def test_rings_hold_no_more_than_the_context() -> None:
    """A window of two million tokens at a context of 32,768 took a gigabyte, and one of 2**31 - 1
    ended the server. A sliding layer's own window may be larger than the context, too."""

    def entries(window: int | None, sliding: int, context: int | None) -> list[int | None]:
        raw = raw_config(layer_types=["sliding_attention"] * 3, sliding_window=sliding)
        config = DraftConfig.from_dict(raw)
        options = replace(Options(window=window).resolve(config), context=context)
        return [options.ring_entries(of.reach, 8) for of in config.groups(options.reach)]

    block = DraftConfig.from_dict(raw_config()).block_size
    for window, sliding in [(None, 1024), (None, 2**31 - 1), (2_000_000, 2**31 - 1), (1024, 2000)]:
        assert entries(window, sliding, 1024) == [(8 + 1) * (1024 + block)]
    assert entries(None, 200, 1024) == entries(300, 200, None) == [(8 + 1) * (200 + block)]


@pytest.mark.parametrize("resized", [False, True], ids=["at once", "after the captures"])
def test_what_runs_at_a_time_is_said_once(resized: bool, caplog: pytest.LogCaptureFixture) -> None:
    """It is said once the pools have their size; more requests than can run are a warning."""
    caplog.set_level("INFO")
    runner = runner_with(reserving(GroupKVSize(DRAFT, None)))
    runner.kv_cache_configurator.post_capture_kv_active = resized
    assert tokens(runner) == 8_000
    assert len(caplog.messages) == (0 if resized else 1)
    if resized:
        assert tokens(runner, 8_500 * TARGET) == 8_500
    (line,) = caplog.messages
    held, has = (4, "8,500") if resized else (3, "8,000")
    assert f"{held} requests of 2,048 tokens run at a time: K/V of {has} tokens" in line
    caplog.clear()
    assert tokens(runner_with(reserving(GroupKVSize(DRAFT, None))), 12_500) == 10
    said, warned = caplog.records
    assert (said.levelname, warned.levelname) == ("INFO", "WARNING")
    assert "--max-running-requests 8: 5 run at a time" in warned.getMessage()


def test_a_ring_is_for_the_requests_that_states_let_run(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = SimpleNamespace(
        max_running_requests=RUNNING, max_total_tokens=None, max_mamba_cache_size=19
    )
    monkeypatch.setattr(memory, "get_schedule", lambda: schedule)
    asked: list[int] = []

    def draft_kv(carried: int) -> tuple[GroupKVSize, ...]:
        asked.append(carried)
        return (RING._replace(ring=100 * carried),)

    runner = runner_with(DraftReservation(draft_kv, RUNNING))
    configurator = runner.kv_cache_configurator
    params = SimpleNamespace(mamba_cache_per_req=1000)
    configurator.mambaish_config = SimpleNamespace(mamba2_cache_params=params)
    configurator.extra_mamba_cache_bytes_per_req = 0
    configurator._calculate_mamba_ratio = lambda: 5
    assert tokens(runner) == (MEMORY - 300 * (DRAFT + 5)) // (TARGET + 4)
    assert asked == [3] and memory.carried_by(runner) == 3
