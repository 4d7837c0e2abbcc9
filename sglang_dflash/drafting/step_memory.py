"""Memory of a draft step beside weights and the K/V of tokens, from the draft's config: what a
server reserves, and what `sglang-dflash inspect` subtracts."""

from __future__ import annotations

import math
from dataclasses import dataclass

from sglang_dflash.facts.draft_config import DraftConfig

# Of a step's table: int32 per request and column. A kernel that cannot mask sorts the live ones to
# the front and counts them (`core.attention.paged`), with int64 numbers.
TABLE_BYTES, SORTED_TABLE_BYTES = 4, 48
# Of a bounded draft KV cache: whose an entry is, and whether it is in use.
BYTES_PER_ENTRY = 5


@dataclass(frozen=True)
class StepShape:
    """The largest steps of a server.

    Attributes:
        block_size: B, tokens of a block.
        requests: R, --max-running-requests.
        columns: of a step's table of entries.
        entries: of a bounded draft KV cache; None for one per target slot.
        itemsize: bytes of a weight, and of the target's hidden states.
        ranks: of the tensor-parallel group.
        sorts: whether draft attention needs the live entries in front.
        waiting_steps: steps of one token per request whose hidden states wait to be absorbed, at
            most (`core.plain_context`); 0 if every step drafts.
    """

    config: DraftConfig
    block_size: int
    requests: int
    columns: int
    entries: int | None
    itemsize: int
    ranks: int = 1
    sorts: bool = False
    waiting_steps: int = 0

    @property
    def slot_tables(self) -> int:
        """Bytes of a step's table, and of a bounded cache's tags without those per target slot."""
        table = self.requests * self.columns * (SORTED_TABLE_BYTES if self.sorts else TABLE_BYTES)
        return table + (0 if self.entries is None else BYTES_PER_ENTRY * (self.entries + 1))

    @property
    def logits(self) -> int:
        """Bytes of a rank's logits of all drafted positions."""
        vocabulary = math.ceil(self.config.vocab_size / self.ranks)
        return self.requests * (self.block_size - 1) * vocabulary * self.itemsize

    @property
    def activations(self) -> int:
        """Bytes that are alive at once, at most: of a layer residual, input, q, k and v,
        attention's output, gate and up, and their product; of a commit features and K/V of all
        layers."""
        config = self.config
        heads = config.num_attention_heads // self.ranks
        kv_heads = max(config.num_key_value_heads // self.ranks, 1)
        attention = 2 * (heads + kv_heads) * config.head_dim
        inner = 3 * (config.intermediate_size // self.ranks)
        of_layer = 3 * config.hidden_size + attention + inner
        kv = len(config.layers) * 2 * kv_heads * config.head_dim
        of_commit = 3 * config.hidden_size + 2 * kv
        tokens = self.requests * max(self.block_size, self.waiting_steps)
        return tokens * max(of_layer, of_commit) * self.itemsize

    def graph_buffers(self, recorded: int) -> int:
        """Bytes of the buffers that recordings of up to `recorded` requests read and write."""
        per_token = 3 * 8 + 1 + self.config.target_hidden_width * self.itemsize
        return recorded * (3 * 8 + self.block_size * per_token)

    @property
    def waiting_hidden(self) -> int:
        """Bytes of the hidden states that wait, and of their concatenation."""
        per_token = 2 * 8 + self.config.target_hidden_width * self.itemsize
        return 2 * self.waiting_steps * self.requests * per_token
