"""The parts that a DFlash2 draft has beyond v1, from its config.json."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_dflash.checkpoint.fields import MOST_WIDTH, Fields, is_int


@dataclass(frozen=True)
class Convolution:
    """The grouped dynamic convolution of a DFlash2 draft: its taps, and channels per group."""

    kernel_size: int
    group_size: int


@dataclass(frozen=True)
class Selector:
    """The candidate selector of a DFlash2 draft: the rank of its tables, and candidates per
    position."""

    rank: int
    top_k: int


def read_convolution(fields: Fields) -> Convolution | None:
    """None in a draft of v1. Raises ConfigError."""
    given = _together(fields, conv_kernel_size=64, conv_group_size=MOST_WIDTH)
    return Convolution(*given) if given else None


def read_selector(fields: Fields) -> Selector | None:
    """None in a draft of v1. Raises ConfigError."""
    given = _together(fields, selector_rank=MOST_WIDTH, selector_top_k=1024)
    return Selector(*given) if given else None


def _is_zero(value: object) -> bool:
    return is_int(value) and value == 0


def _together(fields: Fields, **most: int) -> list[int] | None:
    """Numbers that are given together or not at all: null and 0 are as good as missing.

    Args:
        most: name -> a bound far above any published draft.
    """
    given = [name for name in most if name in fields and not _is_zero(fields.get(name))]
    for name in most if given else ():
        if name not in given:
            raise fields.error(name, f"with {given[0]} a positive integer")
    return [fields.positive_int(name, most=most[name]) for name in given] or None
