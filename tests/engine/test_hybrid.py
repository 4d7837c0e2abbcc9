"""Plain decoding of recurrent targets on our CPU platform, which test_exactness.py compares with,
is that of Transformers."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from tests.engine.servers import HYBRID_MOE_PLAIN, HYBRID_NEXT_PLAIN, HYBRID_PLAIN, ServerConfig
from tests.engine.session import ServerSession
from tests.engine.workload import hybrid_answers

# Logits by which the likeliest token leads everywhere. Between a block and single tokens rounding
# moves a logit by up to 3e-5, at worst the best and the second in opposite directions; how far
# depends on the machine and the batch, which closer decisions would test.
CLEAR = 6e-5


@pytest.mark.parametrize("config", [HYBRID_PLAIN, HYBRID_MOE_PLAIN, HYBRID_NEXT_PLAIN], ids=str)
def test_plain_decoding_is_that_of_transformers(
    config: ServerConfig, answers: Any, servers: ServerSession
) -> None:
    """The CPU platform's own layers, dense and with experts: every token is the one that
    Transformers finds likeliest, by a clear lead."""
    from transformers import AutoModelForCausalLM

    checkpoint = servers.path(dict(config.flags)["--model-path"])
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    for answer in itertools.chain(*answers(config, hybrid_answers).values()):
        prompt = answer["prompt"]
        with torch.no_grad():
            logits = model(torch.tensor([prompt + answer["output_ids"]])).logits
        logits = logits[0, len(prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == answer["output_ids"]
        best, second = logits.topk(2).values.unbind(-1)
        assert (best - second).min() > CLEAR
