"""A server that writes the text of a draft's training (`launch/train_draft.py --server`)."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from launch.draft_training.decoding import DecodingJob, fast_decoding
from launch.draft_training.text import ANSWERS
from launch.draft_training.writers import ServerWriter, TransformersWriter
from sglang_dflash.tools.bench.server import Server
from sglang_dflash.tools.demo_pairs.pairs import demo_pair
from tests.engine.servers import PLAIN

LOOP_TOKENS = 8


@pytest.mark.server(PLAIN)
def test_it_writes_what_transformers_writes(server: Server) -> None:
    """Greedy texts, those that end and those that run into a loop included; sampled ones are of
    their length."""
    pair = demo_pair("dense")
    tokenizer = AutoTokenizer.from_pretrained(pair.target)
    prompts = [tokenizer(text)["input_ids"] for text in pair.prompts[:6]]
    model = AutoModelForCausalLM.from_pretrained(pair.target, dtype=torch.float32)

    def jobs() -> list[DecodingJob]:
        greedy = [DecodingJob(prompt, limit=40, sampled=False) for prompt in prompts]
        return [
            *greedy,
            DecodingJob(prompts[0], limit=20, sampled=True),
            DecodingJob([5, 5, 5], 40, sampled=False),
        ]

    theirs = jobs()
    # A token of some of the texts ends them.
    TransformersWriter(fast_decoding(model)).write(theirs, {-1}, ANSWERS, 10**6)
    ends = {theirs[0].tokens[17]}
    ours, theirs = jobs(), jobs()
    TransformersWriter(fast_decoding(model)).write(theirs, ends, ANSWERS, LOOP_TOKENS)
    ServerWriter([server.url]).write(ours, ends, ANSWERS, LOOP_TOKENS)
    for mine, other in zip(ours, theirs, strict=True):
        if mine.sampled:
            assert 0 < len(mine.tokens) <= 20 and mine.is_done
        else:
            assert mine == other
    assert {job.ended for job in ours} == {True, False}


def test_a_server_that_is_not_there_is_named() -> None:
    writer = ServerWriter(["http://127.0.0.1:9"])
    with pytest.raises(ValueError, match=r"127\.0\.0\.1:9"):
        writer.write([DecodingJob([1], limit=1, sampled=False)], {2}, ANSWERS, LOOP_TOKENS)
