"""The head of DFlash2 by the files of a checkpoint: a grouped dynamic convolution around each half
of a layer, and a selector of candidates, or one of the two. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

from sglang_dflash.checkpoint.fields import MOST_WIDTH, Fields, is_int
from sglang_dflash.checkpoint.heads.head import HeadConfig, Network

_SELECTOR = "candidate_selector."
# Candidates per position. No published draft has more than 16, and a program of the kernel that
# takes them (`dflash_kernels.candidates`) has no room for more. Torch's would copy all logits.
MOST_CANDIDATES = 64


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


@dataclass(frozen=True)
class DFlash2Config(HeadConfig):
    """The parts that a DFlash2 draft has beyond v1, None for a part that it lacks."""

    architectures = (
        "DFlash2DraftModel", "MiniMaxDFlash2DraftModel", "DFlash2Speculator",
        "Qwen3DFlash2DraftModel",
    )  # fmt: skip
    speculators_type = "dflash2"
    keys = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
    tables = (f"{_SELECTOR}predecessor_codebook", f"{_SELECTOR}successor_codebook")

    convolution: Convolution | None = None
    selector: Selector | None = None

    @classmethod
    def read(cls, fields: Fields) -> Self | None:
        convolution = _together(fields, conv_kernel_size=64, conv_group_size=MOST_WIDTH)
        selector = _together(fields, selector_rank=MOST_WIDTH, selector_top_k=MOST_CANDIDATES)
        if not convolution and not selector:
            return None
        return cls(
            Convolution(*convolution) if convolution else None,
            Selector(*selector) if selector else None,
        )

    @property
    def description(self) -> str:
        parts = [] if self.selector is None else [
            f"selector of rank {self.selector.rank} over {self.selector.top_k} candidates"
        ]  # fmt: skip
        if self.convolution is not None:
            parts.append(f"convolution of {self.convolution.kernel_size} taps")
        return f"DFlash2: {', '.join(parts)}"

    def problems(self, network: Network) -> Iterator[tuple[str, object, str]]:
        width, tokens = network.hidden_size, network.draft_vocab_size or network.vocab_size
        if self.convolution is not None and width % self.convolution.group_size:
            required = f"a divisor of hidden_size ({width}) is required"
            yield "conv_group_size", self.convolution.group_size, required
        if self.selector is not None and self.selector.top_k > tokens:
            required = f"at most {tokens}, the tokens that can be drafted, is required"
            yield "selector_top_k", self.selector.top_k, required

    def tensors(self, network: Network) -> dict[str, tuple[int, ...]]:
        width = network.hidden_size
        shapes: dict[str, tuple[int, ...]] = {}
        if self.selector is not None:
            rank = self.selector.rank
            shapes = dict.fromkeys(self.tables, (network.vocab_size, rank))
            shapes[f"{_SELECTOR}hidden_projection.weight"] = (rank, width)
        if self.convolution is not None:
            for i in range(network.num_hidden_layers):
                for name in ("attention_conv", "mlp_conv"):
                    prefix = f"layers.{i}.{name}."
                    shapes[f"{prefix}base_kernel"] = (2, self.convolution.kernel_size, width)
                    shapes[f"{prefix}kernel_projection.weight"] = (self._kernels(width), width)
        return shapes

    @property
    def row_values(self) -> int:
        """A row for the token before, and one per candidate."""
        return 0 if self.selector is None else (1 + self.selector.top_k) * self.selector.rank

    def moved(self, network: Network, tokens: int, drafted: int) -> int:
        width, values = network.hidden_size, 0
        if self.convolution is not None:
            # Two in a layer, each with a product that makes its kernels.
            values += 2 * network.num_hidden_layers * tokens * (width + self._kernels(width))
        if self.selector is not None:
            values += drafted * (width + self.selector.rank)
        return values

    @property
    def candidates(self) -> int:
        return super().candidates if self.selector is None else self.selector.top_k

    @property
    def position_bytes(self) -> int:
        """And the projected hidden state in float32."""
        return super().position_bytes + (0 if self.selector is None else 4 * self.selector.rank)

    def activations(self, network: Network) -> int:
        """A convolution's input and output, and the kernels of both, projected at once."""
        width = network.hidden_size
        return 0 if self.convolution is None else 2 * width + self._kernels(width)

    def _kernels(self, width: int) -> int:
        """Numbers of a token's kernels, of the input's and the output's convolution."""
        if self.convolution is None:
            return 0
        return 2 * self.convolution.kernel_size * (width // self.convolution.group_size)


def _together(fields: Fields, **most: int) -> list[int] | None:
    """Numbers that are given together or not at all: null and 0 are as good as missing.

    Args:
        most: name -> a bound above any published draft.
    """
    values = {name: fields.get(name) for name in most if name in fields}
    declared = [name for name, value in values.items() if not is_int(value) or value != 0]
    for name in most if declared else ():
        if name not in declared:
            raise fields.error(name, f"with {declared[0]} a positive integer")
    return [fields.positive_int(name, most=most[name]) for name in declared] or None
