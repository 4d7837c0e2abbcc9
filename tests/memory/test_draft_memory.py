"""The formulas of what draft steps take, and of what SGLang makes beside them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_dflash.memory.draft_memory import (
    GRAPH_BYTES_PER_REQUEST,
    NarrowForwards,
    default_captures,
    narrow_width_bytes,
)

REQUESTS, POSITIONS = 5, 3000
NARROW = NarrowForwards((1, 8), attention={"fa3"}, query_width=512, captured=(1, 2, 4))
CELLS, GRAPHS = REQUESTS * POSITIONS, REQUESTS * GRAPH_BYTES_PER_REQUEST


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 2 * 16 * CELLS + 2 * GRAPHS + (1 + 8) * 1024 * 2 * 7),
        ({"captured": ()}, 2 * 16 * CELLS),
        (
            {"captured": (), "attention": {"triton"}},
            (9 * 9 + 2 * 4) * CELLS + 9 * 4 * REQUESTS * 512 * 8,
        ),
        # A wrapper per captured batch size, and four more.
        (
            {"attention": {"flashinfer"}},
            9 * 5 * CELLS + 2 * 7 * (8 << 20) + 2 * GRAPHS + (1 + 8) * 1024 * 2 * 7,
        ),
        # One backend prefills and another decodes: both verify tables exist.
        ({"captured": (), "attention": ("fa3", "trtllm_mha")}, 2 * 2 * 16 * CELLS),
        ({"captured": (), "attention": ("fa3", "fa3")}, 2 * 16 * CELLS),
        ({"widths": ()}, 0),
    ],
)
def test_narrower_widths_of_the_target_are_reserved(changes: Any, expected: int) -> None:
    sized = narrow_width_bytes(
        NARROW._replace(**changes), requests=REQUESTS, positions=POSITIONS, hidden_bytes=2 * 1024
    )
    assert sized == expected


@pytest.mark.parametrize("requests", [1, 9, 48, 100, 256, 300])
def test_default_captures_are_sglangs(requests: int) -> None:
    """A batch size above the running requests' is captured for them."""
    from sglang.srt.arg_groups.cuda_graph_hook import generate_decode_cuda_graph_batch_sizes

    settings: Any = SimpleNamespace(
        disable_cuda_graph_padding=False, speculative_algorithm="DFLASH"
    )
    sizes = generate_decode_cuda_graph_batch_sizes(settings, max_bs=512)
    # Those that are larger record nothing that the last one does not.
    of_server = tuple(sorted({min(size, requests) for size in sizes}))
    assert default_captures(requests) == of_server
