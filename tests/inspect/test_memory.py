"""Memory arithmetic against figures worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest

from sglang_dflash.drafting.options import DRAFT_KV_HEADROOM, Options
from sglang_dflash.facts.draft_config import DraftConfig
from sglang_dflash.facts.errors import ConfigError
from sglang_dflash.facts.sizes import draft_weight_bytes
from sglang_dflash.inspect.memory import GIB, Serving, split_kv
from sglang_dflash.inspect.report import inspect
from tests.conftest import raw_config
from tests.facts.target_fields import GDN, TARGET
from tests.inspect.pairs import facts


def test_draft_weights_by_hand() -> None:
    attention = 32 * 64 + 2 * 32 * 32 + 64 * 32
    layer = attention + 3 * 32 * 48 + 2 * 32 + 2 * 16
    assert draft_weight_bytes(DraftConfig.from_dict(raw_config())) == 2 * (
        2 * 32 * 32 + 3 * layer + 2 * 32
    )
    biases = 3 * (64 + 32 + 32 + 32)
    assert draft_weight_bytes(DraftConfig.from_dict(raw_config(attention_bias=True))) == 2 * (
        2 * 32 * 32 + 3 * layer + 2 * 32 + biases
    )


def test_a_bounded_cache_leaves_the_rest_to_the_target() -> None:
    split = split_kv(12_000, 100, 20, entries=30)
    assert split.bounded
    assert (split.draft_kv_entries, split.draft_kv_bytes) == (30, 600)
    assert (split.target_tokens, split.target_tokens_without_draft_kv) == (114, 120)
    assert (split.target_tokens_unbounded, split.draft_kv_bytes_unbounded) == (100, 2000)
    assert split.target_tokens_gain == pytest.approx(0.14)
    assert split.target_tokens_gain_ceiling == pytest.approx(0.2)


@pytest.mark.parametrize("slots", [None, 100, 5000])
def test_a_cache_larger_than_the_targets_pool_has_one_slot_per_token(slots: int | None) -> None:
    split = split_kv(12_000, 100, 20, slots)
    assert not split.bounded
    assert (split.draft_kv_entries, split.draft_kv_bytes) == (100, 2000)
    assert (split.target_tokens, split.target_tokens_gain) == (100, 0)


def test_memory_is_what_weights_and_states_leave() -> None:
    target = facts({**TARGET, "full_attention_interval": 2, **GDN}, GIB)
    serving = Serving(max_running_requests=10, memory_gib=4, mem_fraction=0.5)
    found = inspect(target, facts(raw_config()), Options(), serving)
    state = 3 * (3 * 7 * 5 * 4 + (2 * 2 * 5 + 3 * 7) * 3 * 2)
    # Block 4: 4 + 4 - 2 inputs of a convolution of width 4, 3 before them, and two gates of 3 heads
    # per token.
    replay = 3 * ((2 * 2 * 5 + 3 * 7) * (6 + 3) + 2 * 4 * 3) * 2
    assert found.recurrent_replay_bytes == replay
    assert found.recurrent_snapshot_bytes == 3 * (4 * 3 * 7 * 5 * 4 + 41 * 6 * 2)
    draft = draft_weight_bytes(DraftConfig.from_dict(raw_config()))
    step = found.draft_step_bytes
    # Logits and activations of 10 requests and 4 positions, and more.
    assert step is not None and step > 10 * (3 * 64 + 4 * 3 * 32) * 2
    assert found.kv_memory_bytes == 2 * GIB - GIB - draft - 10 * (state + replay) - step
    assert found.worker == "sglang-dflash" and found.recurrent_layers == 3


def test_options_size_the_cache_and_dtypes_its_entries() -> None:
    serving = Serving(
        max_running_requests=3, kv_memory_gib=1, kv_dtype="fp8_e4m3", draft_kv_dtype="float32"
    )
    pair = facts(TARGET), facts(raw_config())
    report = inspect(*pair, Options(window=100, sinks=4), serving).report()
    assert report["draft_kv_entries"] == int(DRAFT_KV_HEADROOM * 3 * (100 + 4 + 4))
    assert report["target_kv_bytes_per_token"] == 6 * 2 * 2 * 16
    assert report["draft_kv_bytes_per_token"] == 3 * 2 * 2 * 16 * 4
    assert (report["worker"], report["block_size"]) == ("sglang-dflash", 4)
    assert report["draft_kv_map"] == "bounded"
    chosen = inspect(*pair, Options(window=100, draft_kv_tokens=7), serving)
    assert chosen.kv.draft_kv_entries == 7
    inherited = inspect(*pair, Options(), Serving(kv_memory_gib=1, kv_dtype="fp8_e4m3"))
    assert inherited.draft_kv_bytes_per_token == 3 * 2 * 2 * 16


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        (Options(), (4, None, 0)),
        (Options(block_size=6, window=100, sinks=4), (6, 100, 4)),
    ],
    ids=["default", "window"],
)
@pytest.mark.parametrize("head", [{}, {"selector_rank": 256}], ids=["v1", "other"])
def test_the_report_shows_the_options_in_effect(
    head: dict[str, Any], options: Options, shown: tuple[int, int | None, int]
) -> None:
    found = inspect(facts(TARGET), facts(raw_config(**head)), options, Serving(kv_memory_gib=1))
    assert (found.block_size, found.window, found.sinks) == shown


@pytest.mark.parametrize(
    ("serving", "message"),
    [
        ({"max_running_requests": 0}, "--max-running-requests: 0"),
        ({"mem_fraction": 1.5}, "--mem-fraction: 1.5"),
        ({"memory_gib": -1.0}, "--memory-gib: -1.0"),
        ({"kv_memory_gib": float("nan")}, "--kv-memory-gib: nan"),
        ({"kv_dtype": "int3"}, "--kv-dtype: 'int3'; there is bfloat16"),
        (
            {"kv_memory_gib": 1e-8},
            "--kv-memory-gib: 9.31323e-09 GiB of KV memory do not hold one token",
        ),
        ({"memory_gib": 1.0}, "--memory-gib 1 x --mem-fraction 0.9: the weights alone do not fit"),
    ],
)
def test_serving_is_checked(serving: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        inspect(facts(TARGET, GIB), facts(raw_config()), Options(), Serving(**serving))


def test_what_is_not_known_is_asked_for() -> None:
    with pytest.raises(
        ConfigError, match="--kv-memory-gib: required, because the size of the target's weights"
    ):
        inspect(facts(TARGET, None), facts(raw_config()), Options(), Serving())
    measured = facts(None, None, kv=100)
    with pytest.raises(ConfigError, match="block_size: None; required"):
        inspect(measured, measured, Options(), Serving(kv_memory_gib=1))
    as_float32 = Serving(kv_memory_gib=1, kv_dtype="float32")
    with pytest.raises(ConfigError, match="--kv-dtype: 'float32', but of a model only"):
        inspect(measured, measured, Options(block_size=4), as_float32)
