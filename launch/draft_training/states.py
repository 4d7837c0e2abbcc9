"""Inputs and labels of a draft from a text: the target's hidden states and likeliest tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .device import now, sent, wait

# The target's likeliest tokens that are kept of every place.
LIKELIEST = 8
# At a time: texts, their tokens with padding, and places whose logits are computed.
ROWS, TOKENS = {"cpu": 8, "cuda": 2**30}, {"cpu": 2**30, "cuda": 2**15}
PLACES = {"cpu": 256, "cuda": 4096}


@dataclass(frozen=True)
class States:
    """Texts one after another: n texts, T tokens of all, m answers, F layers, E hidden size.

    Attributes:
        begins: int64 `[n + 1]`, where each text begins.
        answers: int64 `[m, 3]`: of which text, begin and end in it.
        kinds: of the m answers.
        ids: int64 `[T]`.
        hidden: bfloat16 `[T, F E]`, outputs of the layers that the draft reads.
        likely: int32 `[T, K]`, the tokens that the target finds likeliest after each token, the
            first of them is its greedy token; `log_p`: float16 `[T, K]`. Both are zero where no
            answer follows.
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
        """Size of the tensors of batches."""
        return sum(of.nbytes for of in (self.ids, self.hidden, self.likely, self.log_p))

    def to(self, device: torch.device) -> States:
        """Move the tensors of batches to a device; begins and answers are read on the host."""
        moved = {
            name: getattr(self, name).to(device) for name in ("ids", "hidden", "likely", "log_p")
        }
        return replace(self, **moved)


# Not inference_mode: a backward pass may not keep the tensors that this makes.
@torch.no_grad()
def states_of(
    target: PreTrainedModel, layer_ids: Sequence[int], rows: Sequence[dict[str, Any]]
) -> States:
    """Compute the states of texts with the keys `ids`, `answers` and `kind`, on the target's
    device."""
    device, of = target.device, target.config.get_text_config()
    lengths = torch.tensor([len(row["ids"]) for row in rows], dtype=torch.int64)
    begins = torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)))
    flat = torch.tensor([token for row in rows for token in row["ids"]], dtype=torch.int64)
    ids, total = flat.to(device), len(flat)
    width = len(layer_ids) * of.hidden_size
    hidden = torch.empty(total, width, dtype=torch.bfloat16, device=device)
    likely = torch.zeros(total, LIKELIEST, dtype=torch.int32, device=device)
    log_p = torch.zeros(total, LIKELIEST, dtype=torch.float16, device=device)
    for batch in _batches(lengths.tolist(), device):
        padded, to, from_ = _places(lengths, begins, batch)
        asked = torch.zeros(padded, dtype=torch.int64)
        asked.view(-1)[from_] = flat[to]
        # Padding on the right: no token sees it.
        out = target.get_decoder()(
            input_ids=sent(asked, device), use_cache=False, output_hidden_states=True
        )
        joined = torch.cat([out.hidden_states[i + 1] for i in layer_ids], -1).flatten(0, 1)
        hidden[sent(to, device)] = joined[sent(from_, device)].bfloat16()
        to, from_ = _answered(rows, begins, batch, padded[1])
        if len(to):
            to, final = sent(to, device), out.last_hidden_state.flatten(0, 1)[sent(from_, device)]
            likely[to], log_p[to] = _likeliest(target, final)
    spans = [(i, *span) for i, row in enumerate(rows) for span in row["answers"]]
    kinds = [row["kind"] for row in rows for _ in row["answers"]]
    answers = torch.tensor(spans, dtype=torch.int64).view(-1, 3)
    return States(begins, answers, kinds, ids, hidden, likely, log_p)


def _batches(lengths: list[int], device: torch.device) -> Iterator[list[int]]:
    """Numbers of the texts of each batch: of like lengths, and no more than the device takes."""
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
    """Shape `(R, W)` of a padded batch, and of all its n tokens the places int64 `[n]` among those
    of all texts, and in the flattened batch."""
    own = lengths[batch]
    column = torch.arange(int(own.max()))
    inside = column < own[:, None]
    to = (begins[batch][:, None] + column)[inside]
    return (len(batch), len(column)), to, inside.flatten().nonzero()[:, 0]


def _answered(
    rows: Sequence[dict[str, Any]], begins: Tensor, batch: list[int], width: int
) -> tuple[Tensor, Tensor]:
    """`_places` of the tokens that an answer's token follows."""
    to, from_ = [torch.empty(0, dtype=torch.int64)], [torch.empty(0, dtype=torch.int64)]
    for row, i in enumerate(batch):
        for begin, end in rows[i]["answers"]:
            at = torch.arange(begin - 1, end - 1)
            to.append(begins[i] + at)
            from_.append(row * width + at)
    return torch.cat(to), torch.cat(from_)


def _likeliest(target: PreTrainedModel, final: Tensor) -> tuple[Tensor, Tensor]:
    """The tokens `[N, K]` and their log probabilities, from final hidden states `[N, E]`.

    Logits in bfloat16 have ties; those of twice as many candidates are computed again.
    """
    head = target.get_output_embeddings()
    found = []
    for part in final.split(PLACES[final.device.type]):
        logits = head(part)
        candidates = logits.topk(2 * LIKELIEST, dim=-1).indices
        exact = torch.einsum("nke,ne->nk", head.weight[candidates].float(), part.float())
        best = exact.topk(LIKELIEST, dim=-1)
        total = logits.float().logsumexp(-1, keepdim=True)
        found.append((candidates.gather(1, best.indices).int(), (best.values - total).half()))
    likely, log_p = zip(*found, strict=True)
    return torch.cat(likely), torch.cat(log_p)


def read_text(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()[1:]]


def write_states(
    target: PreTrainedModel, layer_ids: Sequence[int], texts: Path, folder: Path
) -> None:
    """Write the states of all shards of text that have none yet."""
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
    """Tensors are mapped from the file, and read when they are indexed."""
    state = torch.load(file, mmap=True, map_location="cpu")
    return States(**{name: state[name] for name in States.__dataclass_fields__})


def hold_states(
    target: PreTrainedModel,
    layer_ids: Sequence[int],
    texts: Path,
    folder: Path,
    held: dict[str, States],
    limit: float,
) -> bool:
    """Compute the states of all shards of text that are not in `held` (name -> states) yet, and
    keep them there, on the target's device. `folder` gets a line of each, and no states.

    Returns:
        Whether all are held: of a shard that would make more than `limit` bytes of them, and of
        those after it, none are computed. The first shard always is.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for text in sorted(texts.glob("*.jsonl")):
        if text.stem in held:
            continue
        began, rows = now(target.device), read_text(text)
        size = bytes_of_token(target, layer_ids) * sum(len(row["ids"]) for row in rows)
        before = sum(of.bytes for of in held.values())
        if held and before + size > limit:
            print(
                f"states {text.stem}: not loaded, nor those after it: with {size / 2**30:.1f} GiB "
                f"more than {before / 2**30:.1f} GiB they pass --max-state-gib",
                flush=True,
            )
            return False
        held[text.stem] = states = states_of(target, layer_ids, rows)
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
    """Bytes of its id, hidden states, and likeliest tokens with their probabilities."""
    return 8 + 2 * len(layer_ids) * target.config.get_text_config().hidden_size + 6 * LIKELIEST
