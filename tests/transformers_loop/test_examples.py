"""examples/transformers_generate.py runs as its first lines say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from sglang_dflash.facts.embedded import demo_pair
from sglang_dflash.transformers_loop import chat_tokens

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.engine
def test_transformers_generate() -> None:
    import torch

    pair = demo_pair("dense")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", EXAMPLES / "transformers_generate.py", "--device", "cpu",
         "--dtype", "float32", "--max-new-tokens", "32"],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    tokenizer = AutoTokenizer.from_pretrained(pair.target)
    target = AutoModelForCausalLM.from_pretrained(pair.target, dtype=torch.float32).eval()
    ids = chat_tokens(tokenizer, [{"role": "user", "content": pair.prompts[0]}])
    out = target.generate(torch.tensor([ids]), max_new_tokens=32, do_sample=False)
    answer, rate = done.stdout.removesuffix("\n").rsplit("\n", 1)
    assert answer == tokenizer.decode(out[0, len(ids) :])
    assert re.fullmatch(r"32 tokens, [\d.]+ tokens/s, prefill included", rate)
