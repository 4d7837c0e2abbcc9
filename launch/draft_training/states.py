"""Inputs and labels of a draft from a text: the target's hidden states and likeliest tokens."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .device import now

# The target's likeliest tokens that are kept of every place; texts, and places whose logits are
# computed at a time.
LIKELIEST = 8
ROWS, PLACES = {"cpu": 8, "cuda": 64}, {"cpu": 256, "cuda": 4096}


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

    def to(self, device: torch.device) -> States:
        """Move the tensors of batches to a device; begins and answers are read on the host."""
        moved = {
            name: getattr(self, name).to(device) for name in ("ids", "hidden", "likely", "log_p")
        }
        return replace(self, **moved)


@torch.inference_mode()
def states_of(
    target: PreTrainedModel, layer_ids: Sequence[int], rows: Sequence[dict[str, Any]]
) -> States:
    """Compute the states of texts with the keys `ids`, `answers` and `kind`."""
    lengths = torch.tensor([len(row["ids"]) for row in rows])
    begins = torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)))
    total, of = int(begins[-1]), target.config.get_text_config()
    hidden = torch.empty(total, len(layer_ids) * of.hidden_size, dtype=torch.bfloat16)
    likely = torch.zeros(total, LIKELIEST, dtype=torch.int32)
    log_p = torch.zeros(total, LIKELIEST, dtype=torch.float16)
    for batch in lengths.argsort().split(ROWS[target.device.type]) if rows else ():
        longest = int(lengths[batch].max())
        ids = torch.tensor([rows[i]["ids"] + [0] * (longest - int(lengths[i])) for i in batch])
        # Padding on the right: no token sees it.
        out = target.get_decoder()(
            input_ids=ids.to(target.device), use_cache=False, output_hidden_states=True
        )
        joined = torch.cat([out.hidden_states[i + 1] for i in layer_ids], -1)
        for row, i in enumerate(batch.tolist()):
            own = slice(int(begins[i]), int(begins[i + 1]))
            hidden[own] = joined[row, : int(lengths[i])].cpu()
            for begin, end in rows[i]["answers"]:
                at = slice(int(begins[i]) + begin - 1, int(begins[i]) + end - 1)
                final = out.last_hidden_state[row, begin - 1 : end - 1]
                likely[at], log_p[at] = _likeliest(target, final)
    spans = [(i, *span) for i, row in enumerate(rows) for span in row["answers"]]
    kinds = [row["kind"] for row in rows for _ in row["answers"]]
    ids = torch.tensor([token for row in rows for token in row["ids"]])
    return States(begins, torch.tensor(spans).view(-1, 3), kinds, ids, hidden, likely, log_p)


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
    return torch.cat(likely).cpu(), torch.cat(log_p).cpu()


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
        states = states_of(target, layer_ids, read_text(text))
        spent = now(target.device) - began
        torch.save({**asdict(states), "spent": spent}, file.with_suffix(".tmp"))
        file.with_suffix(".tmp").replace(file)
        print(f"states {text.stem}: {len(states.ids)} tokens, {spent:.0f} s", flush=True)


def read_states(file: Path) -> States:
    """Tensors are mapped from the file, and read when they are indexed."""
    state = torch.load(file, mmap=True, map_location="cpu")
    return States(**{name: state[name] for name in States.__dataclass_fields__})
