"""The values of a draft's weights: no NaN, no Inf, no matrix or norm of zeros. No torch here.

A draft with such weights would be served: its proposals are rejected, so outputs stay exact, at the
speed of plain decoding or less. Files are mapped, and read once at the speed of memory or disk.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from sglang_dflash.facts.draft_config import DraftConfig
from sglang_dflash.facts.errors import ConfigError
from sglang_dflash.facts.tensors import (
    check_tensors,
    expected_tensors,
    plain_name,
    safetensors_files,
    stored_tensors,
)

# dtype in a header -> the unsigned integer of its width, and the bits of infinity. With the sign
# bit cleared, the bits of finite numbers are below those of infinity, and the bits of NaN above.
_BITS = {
    "BF16": ("<u2", 0x7F80),
    "F16": ("<u2", 0x7C00),
    "F32": ("<u4", 0x7F80_0000),
    "F64": ("<u8", 0x7FF0_0000_0000_0000),
}
# Elements that are looked at together: they stay in the CPU's cache.
_CHUNK = 1 << 18


def check_weights(config: DraftConfig, folder: str | Path) -> None:
    """Raise ConfigError unless `folder` holds the tensors of the config, with values of trained
    weights.

    `generate` and servers refuse a draft by this function, and `sglang-dflash inspect` a local one.
    """
    check_tensors(config, stored_tensors(folder))
    check_values(config, folder)


def check_values(config: DraftConfig, folder: str | Path) -> None:
    """Raise ConfigError if a tensor of the draft holds NaN or Inf, or a weight is all zeros.

    Biases may be zeros. The tensors are those that `check_tensors` has accepted.
    """
    names = expected_tensors(config)
    for name, dtype, bits in _mapped(folder):
        if name not in names:
            continue
        infinity = _BITS[dtype][1]
        largest = _largest(bits)
        if largest >= infinity:
            raise ConfigError(
                f"draft checkpoint: {name} holds {_count(bits, infinity)} of {len(bits)} values "
                "that are NaN or infinite; finite weights are required"
            )
        if largest == 0 and name.endswith(".weight"):
            raise ConfigError(
                f"draft checkpoint: {name} is all zeros; trained weights are required"
            )


def _mapped(folder: str | Path) -> Iterator[tuple[str, str, np.ndarray]]:
    """Name, dtype, and bits as unsigned integers `[N]` of the tensors that have a dtype in `_BITS`.
    The headers are valid: `stored_tensors` has read them."""
    for file in safetensors_files(folder):
        with file.open("rb") as opened:
            size = int.from_bytes(opened.read(8), "little")
            header = json.loads(opened.read(size))
        data = np.memmap(file, dtype=np.uint8, mode="r")[8 + size :]
        for stored, tensor in header.items():
            if stored == "__metadata__" or tensor["dtype"] not in _BITS:
                continue
            begin, end = tensor["data_offsets"]
            bits = data[begin:end].view(_BITS[tensor["dtype"]][0])
            yield plain_name(stored), tensor["dtype"], bits


def _largest(bits: np.ndarray) -> int:
    """The bits of the largest magnitude."""
    chunks = (bits[i : i + _CHUNK] for i in range(0, len(bits), _CHUNK))
    return max((int(_magnitudes(chunk).max()) for chunk in chunks), default=0)


def _count(bits: np.ndarray, infinity: int) -> int:
    return int((_magnitudes(bits) >= infinity).sum())


def _magnitudes(bits: np.ndarray) -> np.ndarray:
    """The same with the sign bit cleared."""
    return bits & bits.dtype.type((1 << (8 * bits.itemsize - 1)) - 1)
