"""Inputs and labels of a draft's training: the target's hidden states and likeliest tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .device import now, send, wait

# Number of the target's likeliest tokens that are kept for every token.
LIKELIEST = 8
# Limits of a batch: texts, and tokens with padding. PLACES: tokens whose logits are computed at a
# time.
ROWS, TOKENS = {"cpu": 8, "cuda": 2**30}, {"cpu": 2**30, "cuda": 2**15}
PLACES = {"cpu": 256, "cuda": 4096}


@dataclass(frozen=True)
class States:
    """Concatenated texts: n texts, T tokens in all, m answers, F layers, E hidden size.

    Attributes:
        begins: int64 `[n + 1]`, index of each text's first token.
        answers: int64 `[m, 3]`: index of the text, begin and end in it.
        kinds: sources of the m answers (`Chat.source`).
        ids: int64 `[T]`.
        hidden: bfloat16 `[T, F E]`, outputs of the layers that the draft reads.
        likely: int32 `[T, K]`, the target's likeliest tokens after each token, its greedy token
            first; zero where no token of an answer follows.
        log_p: float16 `[T, K]`, their log-probabilities.
    """

    begins: Tensor
    answers: Tensor
    kinds: list[str]
    ids: Tensor
    hidden: Tensor
    likely: Tensor
    log_p: Tensor

    @property
    def bytes(self) -> int:
        """Bytes of the tensors that `to` moves."""
        return sum(tensor.nbytes for tensor in (self.ids, self.hidden, self.likely, self.log_p))

    def to(self, device: torch.device) -> States:
        """Move the tensors of tokens to a device. `begins` and `answers` stay on the host."""
        moved = {
            name: getattr(self, name).to(device) for name in ("ids", "hidden", "likely", "log_p")
        }
        return replace(self, **moved)


# Not inference_mode: a backward pass cannot save its tensors.
@torch.no_grad()
def states_of(
    target: PreTrainedModel, layer_ids: Sequence[int], rows: Sequence[dict[str, Any]]
) -> States:
    """Compute the states of texts with the keys `ids`, `answers` and `kind`, on the target's
    device."""
    device, config = target.device, target.config.get_text_config()
    lengths = torch.tensor([len(row["ids"]) for row in rows], dtype=torch.int64)
    begins = torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)))
    flat = torch.tensor([token for row in rows for token in row["ids"]], dtype=torch.int64)
    ids, total = flat.to(device), len(flat)
    width = len(layer_ids) * config.hidden_size
    hidden = torch.empty(total, width, dtype=torch.bfloat16, device=device)
    likely = torch.zeros(total, LIKELIEST, dtype=torch.int32, device=device)
    log_p = torch.zeros(total, LIKELIEST, dtype=torch.float16, device=device)
    for batch in _batches(lengths.tolist(), device):
        padded, to, from_ = _places(lengths, begins, batch)
        padded_ids = torch.zeros(padded, dtype=torch.int64)
        padded_ids.view(-1)[from_] = flat[to]
        # Padding is on the right, where no token sees it.
        out = target.get_decoder()(
            input_ids=send(padded_ids, device), use_cache=False, output_hidden_states=True
        )
        joined = torch.cat([out.hidden_states[i + 1] for i in layer_ids], -1).flatten(0, 1)
        hidden[send(to, device)] = joined[send(from_, device)].bfloat16()
        to, from_ = _answer_places(rows, begins, batch, padded[1])
        if len(to):
            to, final = send(to, device), out.last_hidden_state.flatten(0, 1)[send(from_, device)]
            likely[to], log_p[to] = _likeliest(target, final)
    spans = [(i, *span) for i, row in enumerate(rows) for span in row["answers"]]
    kinds = [row["kind"] for row in rows for _ in row["answers"]]
    answers = torch.tensor(spans, dtype=torch.int64).view(-1, 3)
    return States(begins, answers, kinds, ids, hidden, likely, log_p)


def _batches(lengths: list[int], device: torch.device) -> Iterator[list[int]]:
    """Yield the indices of each batch's texts: of similar lengths, within the device's limits."""
    batch: list[int] = []
    for i in sorted(range(len(lengths)), key=lengths.__getitem__):
        padded = (len(batch) + 1) * lengths[i]
        if batch and (len(batch) == ROWS[device.type] or padded > TOKENS[device.type]):
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch


def _places(
    lengths: Tensor, begins: Tensor, batch: list[int]
) -> tuple[tuple[int, int], Tensor, Tensor]:
    """Return the shape `(R, W)` of a padded batch, and the indices int64 `[n]` of its n tokens in
    the concatenated texts and in the flattened batch."""
    batch_lengths = lengths[batch]
    column = torch.arange(int(batch_lengths.max()))
    inside = column < batch_lengths[:, None]
    to = (begins[batch][:, None] + column)[inside]
    return (len(batch), len(column)), to, inside.flatten().nonzero()[:, 0]


def _answer_places(
    rows: Sequence[dict[str, Any]], begins: Tensor, batch: list[int], width: int
) -> tuple[Tensor, Tensor]:
    """Return the same indices for the tokens that a token of an answer follows."""
    to, from_ = [torch.empty(0, dtype=torch.int64)], [torch.empty(0, dtype=torch.int64)]
    for row, i in enumerate(batch):
        for begin, end in rows[i]["answers"]:
            at = torch.arange(begin - 1, end - 1)
            to.append(begins[i] + at)
            from_.append(row * width + at)
    return torch.cat(to), torch.cat(from_)


def _likeliest(target: PreTrainedModel, final: Tensor) -> tuple[Tensor, Tensor]:
    """Return the likeliest tokens `[N, K]` and their log-probabilities after final hidden states
    `[N, E]`.

    bfloat16 logits have ties, so the logits of twice as many candidates are computed in float32.
    """
    head = target.get_output_embeddings()
    chunks = []
    for part in final.split(PLACES[final.device.type]):
        logits = head(part)
        candidates = logits.topk(2 * LIKELIEST, dim=-1).indices
        exact = torch.einsum("nke,ne->nk", head.weight[candidates].float(), part.float())
        best = exact.topk(LIKELIEST, dim=-1)
        total = logits.float().logsumexp(-1, keepdim=True)
        chunks.append((candidates.gather(1, best.indices).int(), (best.values - total).half()))
    likely, log_p = zip(*chunks, strict=True)
    return torch.cat(likely), torch.cat(log_p)


def read_text(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()[1:]]


def write_states(
    target: PreTrainedModel, layer_ids: Sequence[int], texts: Path, folder: Path
) -> None:
    """Write the states of all shards of text whose states are not in `folder` yet."""
    folder.mkdir(parents=True, exist_ok=True)
    for text in sorted(texts.glob("*.jsonl")):
        file = folder / f"{text.stem}.pt"
        if file.exists():
            continue
        began = now(target.device)
        states = states_of(target, layer_ids, read_text(text)).to(torch.device("cpu"))
        spent = now(target.device) - began
        torch.save({**asdict(states), "spent": spent}, file.with_suffix(".tmp"))
        file.with_suffix(".tmp").replace(file)
        print(f"states {text.stem}: {len(states.ids)} tokens, {spent:.0f} s", flush=True)


def read_states(file: Path) -> States:
    """Map states from a file. Tensors are read when they are indexed."""
    state = torch.load(file, mmap=True, map_location="cpu")
    return States(**{name: state[name] for name in States.__dataclass_fields__})


def hold_states(
    target: PreTrainedModel,
    layer_ids: Sequence[int],
    texts: Path,
    folder: Path,
    states_by_shard: dict[str, States],
    limit: float,
) -> bool:
    """Compute the states of all shards of text that `states_by_shard` lacks, and keep them there,
    on the target's device. `folder` gets a line for each shard, without its states.

    Returns:
        True if all states are held. A shard with which they would exceed `limit` bytes, and all
        after it, are left out; the first shard never is.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for text in sorted(texts.glob("*.jsonl")):
        if text.stem in states_by_shard:
            continue
        began, rows = now(target.device), read_text(text)
        size = bytes_of_token(target, layer_ids) * sum(len(row["ids"]) for row in rows)
        before = sum(shard_states.bytes for shard_states in states_by_shard.values())
        if states_by_shard and before + size > limit:
            print(
                f"states {text.stem}: not loaded, nor those after it: with {size / 2**30:.1f} GiB "
                f"more than {before / 2**30:.1f} GiB they pass --max-state-gib",
                flush=True,
            )
            return False
        states_by_shard[text.stem] = states = states_of(target, layer_ids, rows)
        wait(target.device)
        spent, tokens = now(target.device) - began, len(states.ids)
        (folder / text.name).write_text(json.dumps({"tokens": tokens, "spent": spent}) + "\n")
        print(
            f"states {text.stem}: {tokens} tokens, {spent:.1f} s, "
            f"{(before + size) / 2**30:.1f} GiB of memory so far",
            flush=True,
        )
    return True


def bytes_of_token(target: PreTrainedModel, layer_ids: Sequence[int]) -> int:
    """Bytes of a token's id, hidden states, and likeliest tokens with their probabilities."""
    return 8 + 2 * len(layer_ids) * target.config.get_text_config().hidden_size + 6 * LIKELIEST
