"""A draft head by the files of a checkpoint: its keys, tensors and bytes. No torch.

`HeadConfig` is the head of DFlash v1, which has nothing of its own, and the base of all others.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import ClassVar, Protocol, Self

from sglang_dflash.checkpoint.fields import Fields


class Network(Protocol):
    """The sizes of a draft network, those of `DraftConfig`."""

    @property
    def hidden_size(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def num_hidden_layers(self) -> int: ...

    @property
    def draft_vocab_size(self) -> int | None: ...


@dataclass(frozen=True)
class HeadConfig:
    """The head of DFlash v1, and what another one overrides. Its attributes are values of its keys.

    Attributes:
        architectures: names in config.json that such drafts have.
        speculators_type: their `speculators_model_type`; None if that library has no such draft.
        keys: its keys in config.json, at the top or in `dflash_config`.
        tables: its tensors of which a step reads single rows. As of an embedding, their names may
            end in `.weight`.
    """

    architectures: ClassVar[tuple[str, ...]] = (
        "DFlashDraftModel", "DFlashSpeculator", "DFlashQwen3ForCausalLM", "Qwen3DFlashForCausalLM",
        "Qwen3DFlashDraftModel",
    )  # fmt: skip
    speculators_type: ClassVar[str | None] = "dflash"
    keys: ClassVar[tuple[str, ...]] = ()
    tables: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def read(cls, fields: Fields) -> Self | None:
        """The head of a draft with these fields; None if they have another one. Raises ConfigError.

        Args:
            fields: of config.json, merged with those of `dflash_config`.
        """
        return cls()

    @property
    def description(self) -> str:
        """The draft's architecture in words; what a head has stands behind a colon."""
        return "DFlash"

    def problems(self, network: Network) -> Iterator[tuple[str, object, str]]:
        """Key, value and what is required, of each key that does not fit the network."""
        yield from ()

    def tensors(self, network: Network) -> dict[str, tuple[int, ...]]:
        """Name and shape of its tensors. Every rank holds all of them, and the parameters of its
        module in `drafting/heads/` have the same names."""
        return {}

    # -- bytes -------------------------------------------------------------------------------------

    def weights(self, network: Network) -> int:
        """Numbers of its tensors that a proposal reads once: of all but the tables."""
        shapes = self.tensors(network)
        return sum(prod(shape) for name, shape in shapes.items() if name not in self.tables)

    @property
    def row_values(self) -> int:
        """Numbers in the rows of its tables that are read for a drafted position."""
        return 0

    def moved(self, network: Network, tokens: int, drafted: int) -> int:
        """Activations that its own operations read or write in a proposal, at least.

        Args:
            tokens: of the blocks, the bonus tokens included.
            drafted: positions, without them.
        """
        return 0

    @property
    def candidates(self) -> int:
        """Tokens that a draft of a sampled request is drawn from, if there are as many; 1 for a
        head that does not draw."""
        return 16

    @property
    def position_bytes(self) -> int:
        """Bytes that are alive at once for a drafted position, beside its logits: keys, values and
        ids of the candidates."""
        return self.candidates * (8 + 4 + 8)

    def activations(self, network: Network) -> int:
        """Numbers per token that are alive at once in a layer, beyond those of v1."""
        return 0


PLAIN_HEAD = HeadConfig()
