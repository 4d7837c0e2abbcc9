"""Draft configs and options: what is read, what is refused, and the message."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from sglang_dflash.checkpoint.draft_config import DraftConfig, LayerAttention, Reach
from sglang_dflash.checkpoint.target_layers import default_target_layer_ids
from sglang_dflash.common.errors import ConfigError, UnsupportedDraft
from sglang_dflash.drafting.options import Options
from tests.conftest import raw_config, with_own
from tests.errors import refused


def test_published_fields_are_read() -> None:
    config = DraftConfig.from_dict(raw_config())
    assert (
        config.block_size,
        config.mask_token_id,
        config.target_layer_ids,
        config.target_hidden_width,
    ) == (4, 63, (1, 3), 64)
    assert config.layers == (LayerAttention(None, False),) * 3
    assert config.kv_shape == (3, 2, 2, 16)


def test_sliding_layers_are_causal_unless_the_config_denies_it() -> None:
    types = {
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "sliding_window": 9,
    }
    sliding, full = LayerAttention(9, True), LayerAttention(None, False)
    assert DraftConfig.from_dict(raw_config(**types)).layers == (sliding, full, sliding)
    assert DraftConfig.from_dict(raw_config(**types, is_causal=False)).layers[0] == LayerAttention(
        9, False
    )


UNNAMED = "target-layers-not-named"


@pytest.mark.parametrize(
    ("layers", "depth", "ids"),
    [(36, 5, (1, 9, 17, 25, 33)), (64, 5, (1, 16, 31, 46, 61)), (8, 1, (4,))],
)
def test_default_layers_are_the_published_ones(layers: int, depth: int, ids: tuple) -> None:
    assert default_target_layer_ids(layers, depth) == ids


@pytest.mark.parametrize(("named", "expected"), [([1, 3], []), (None, [UNNAMED])])
def test_layers_that_the_draft_does_not_name_are_warned_of(
    named: list[int] | None, expected: list[str]
) -> None:
    config = DraftConfig.from_dict(raw_config(**with_own(target_layer_ids=named)))
    found = Options().resolve(config).warnings(config, {})
    assert [finding.name for finding in found] == expected
    assert all(str(list(config.target_layer_ids)) in finding.problem for finding in found)


UNSUPPORTED = {
    "layer_types[0]": raw_config(layer_types=["linear_attention"] * 3),
    "dflash_config.mask_token_id": raw_config(dflash_config={"target_layer_ids": [1]}),
}


@pytest.mark.parametrize("field", UNSUPPORTED)
def test_other_drafts_are_told_apart_from_mistakes(field: str) -> None:
    """Mistakes are in tests/broken_drafts.py, keys of other drafts in
    tests/checkpoint/test_draft_keys.py."""
    with refused(f"{field} in the draft's config.json", error=UnsupportedDraft):
        DraftConfig.from_dict(UNSUPPORTED[field])


def test_a_draft_that_does_not_tell_the_targets_depth_fits_by_the_layers_that_it_reads() -> None:
    config = DraftConfig.from_dict(raw_config(num_target_layers=None))
    config.check_target(hidden_size=32, vocab_size=64, num_layers=4)
    with refused("target_layer_ids in the draft's config.json", [1, 3]):
        config.check_target(hidden_size=32, vocab_size=64, num_layers=3)
    with refused("num_target_layers in the draft's config.json", ...):
        DraftConfig.from_dict(
            raw_config(num_target_layers=None, dflash_config={"mask_token_id": 1})
        )


@pytest.mark.parametrize(
    ("options", "required"),
    [
        ({"verify_block": 1}, "a number of tokens from 2 to 2147483647 is required"),
        ({"sinks": -1}, "from 0 to"),
        ({"window": 0}, "from 1 to"),
        ({"draft_kv_tokens": 0}, "from 1 to"),
        ({"sinks": 4}, "no effect without a window; give {window} too"),
        ({"draft_kv_tokens": 9}, "all read the whole context; give {window} too"),
        ({"window": 2**31}, "to 2147483647"),
        ({"verify_block": 65}, "more than 16 times .* give at most 64"),
        ({"window": 3}, "smaller than the block size; give at least 4"),
    ],
)
def test_options_are_checked(options: dict, required: str) -> None:
    with pytest.raises(ConfigError) as error:
        Options(**options).resolve(DraftConfig.from_dict(raw_config()))
    ((field, value),) = options.items()
    assert (error.value.field, error.value.value) == (field, value)
    assert re.search(required, error.value.required)


def test_options_take_the_checkpoints_block_and_size_the_cache() -> None:
    resolved = Options(window=100, sinks=4).resolve(DraftConfig.from_dict(raw_config()))
    assert resolved.verify_block == 4
    assert resolved.ring_entries(resolved.reach, 16) == (16 + 1) * (100 + 4 + 4)
    chosen = Options(window=100, draft_kv_tokens=7).resolve(DraftConfig.from_dict(raw_config()))
    assert chosen.ring_entries(chosen.reach, 16) == 7


@pytest.mark.parametrize(("window", "sinks"), [(None, 0), (6, 0), (6, 3), (1, 0), (4, 9)])
@pytest.mark.parametrize("count", [0, 1, 2, 6, 7, 10, 33])
def test_a_reach_tells_which_pages_hold_what_is_read(
    count: int, window: int | None, sinks: int
) -> None:
    """They hold what is read of any length that the last page leaves open, and no page is more."""
    reach = Reach(window, sinks)
    for page_size in (1, 4, 64):
        kept = [page for part in reach.parts(count, page_size) for page in range(count)[part]]
        lengths = range(max(0, (count - 1) * page_size + 1), count * page_size + 1)
        read = {
            (length, position)
            for length in lengths
            for position in range(length)
            if window is None or position < sinks or position >= length - window
        }
        assert kept == sorted({position // page_size for _, position in read})
        for length in lengths:
            assert reach.tokens_read(length) == sum(of_length == length for of_length, _ in read)


@pytest.mark.parametrize(("room", "expected"), [(9, (7, 2)), (3, (1, 2)), (1, (0, 1))])
def test_a_reach_is_resized(room: int, expected: tuple[int, int]) -> None:
    reach = Reach(4, 2).resized(room)
    assert reach == Reach(*expected) and reach.tokens_read(100) == room


@pytest.mark.parametrize(
    ("asked", "looks_up", "draft_block", "fixed", "adaptive"),
    [
        (None, True, 4, [], []),
        (4, True, 4, [], []),
        (3, True, 3, [], []),
        (12, True, 4, ["lookup-block-fixed"], []),
        (12, False, 12, ["block-above-trained"], ["block-above-trained"]),
    ],
)
def test_lookup_fills_what_the_draft_was_not_trained_for(
    asked: int | None, looks_up: bool, draft_block: int, fixed: list[str], adaptive: list[str]
) -> None:
    config = DraftConfig.from_dict(raw_config())
    resolved = Options(asked, looks_up=looks_up).resolve(config)
    assert (resolved.verify_block, resolved.draft_block) == (asked or 4, draft_block)
    for is_fixed, expected in ((True, fixed), (False, adaptive)):
        assert [found.name for found in resolved.warnings(config, {}, is_fixed)] == expected


KINDS = ["sliding_attention", "full_attention", "sliding_attention"]


@pytest.mark.parametrize(
    ("window", "sinks", "expected"),
    [
        (None, 0, {Reach(6): (0, 2), Reach(): (1,)}),
        # A window bounds full layers, and sliding ones if it is narrower.
        (9, 2, {Reach(6): (0, 2), Reach(9, 2): (1,)}),
        (6, 0, {Reach(6): (0, 1, 2)}),
        (6, 2, {Reach(6): (0, 2), Reach(6, 2): (1,)}),
        (5, 2, {Reach(5, 2): (0, 1, 2)}),
    ],
)
def test_layers_with_the_same_reach_are_a_group(
    window: int | None, sinks: int, expected: dict[Reach, tuple[int, ...]]
) -> None:
    config = DraftConfig.from_dict(raw_config(layer_types=KINDS, sliding_window=6))
    groups = config.groups(Reach(window, sinks))
    assert {group.reach: group.numbers for group in groups} == expected
    for group in groups:
        assert group.kv_shape((3, 2, 7, 8)) == (len(group.numbers), 2, 7, 8)
        for number, layer in zip(group.numbers, group.attentions, strict=True):
            assert replace(layer, reach=Reach()) == config.layers[number]
            assert layer.reach == group.reach
    # Its own window gives a draft a ring, whose size can be asked for.
    options = Options(draft_kv_tokens=9).resolve(config)
    assert [options.ring_entries(g.reach, 4) for g in config.groups(options.reach)] == [9, None]
