"""Targets with recurrent layers: outputs are plain decoding's whatever is accepted, by replay and by snapshots."""

from __future__ import annotations

import json
import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from sglang_dflash.bench.server import Server
from tests.serving.conftest import HYBRID, HYBRID_DRAFT, ORACLE, Running, states_of

NEW_TOKENS = 40


@pytest.fixture(scope="module")
def hybrid_pair() -> None:
    """A random target (its outputs are as good as any to be reproduced) and a random draft, with sliding layers as Qwen3.6-27B's has."""
    import torch

    from sglang_dflash.core.weights import save_model
    from tests.conftest import random_model, raw_config
    from tests.hybrid import SHAPE, save_random_hybrid

    save_random_hybrid(HYBRID)
    raw = raw_config(
        hidden_size=SHAPE["hidden_size"], vocab_size=SHAPE["vocab_size"], num_target_layers=4, block_size=8,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"], sliding_window=32,
        dflash_config={"mask_token_id": 1023, "target_layer_ids": [0, 1, 2]},
    )  # fmt: skip
    save_model(random_model(raw), raw, HYBRID_DRAFT, torch.float32)


def prompts() -> list[list[int]]:
    """64 prompts: short ones, ones around the 64-token chunk of prefill, long ones, and ones that share a prefix of 300 tokens."""
    rng = random.Random(1)
    lengths = [1, 2, 5, 17, 40, 63, 64, 65, 127, 128, 129, 200, 255, 256, 257, 300] * 3
    alone = [[rng.randrange(1000) for _ in range(n)] for n in lengths]
    trunk = [rng.randrange(1000) for _ in range(300)]
    return alone + [trunk + [rng.randrange(1000) for _ in range(1 + i)] for i in range(16)]


def ask(server: Server) -> list[dict[str, Any]]:
    """Eight at a time, and the shared prefixes one after another: every one but the first can find its prefix."""

    def one(prompt: list[int]) -> dict[str, Any]:
        return server.generate(prompt, temperature=0, max_new_tokens=NEW_TOKENS, ignore_eos=True)

    every = prompts()
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(one, every[:-16]))
    return answers + [one(prompt) for prompt in every[-16:]]


@pytest.fixture(scope="module")
def plain(running: Running, hybrid_pair: None) -> list[dict[str, Any]]:
    answers = ask(running.get("hybrid-plain"))
    pairs = [[prompt, answer["output_ids"]] for prompt, answer in zip(prompts(), answers, strict=True)]
    ORACLE.write_text(json.dumps(pairs))
    return answers


@pytest.mark.parametrize("name", ["hybrid-replay", "hybrid-snapshot", "hybrid-lazy", "hybrid-no-buffer"])
def test_outputs_are_those_of_plain_decoding(name: str, plain: list[dict[str, Any]], running: Running) -> None:
    server = running.get(name)
    answers = ask(server)
    differing = [i for i, (a, b) in enumerate(zip(answers, plain, strict=True)) if a["output_ids"] != b["output_ids"]]
    assert not differing
    report = server.dflash()
    assert report["recurrent_rollback"] == ("snapshot" if name == "hybrid-snapshot" else "replay")
    # From nothing accepted to everything, all lengths occur, and 8 requests at a time mix them.
    by_position = report["acceptance_by_position"]
    assert 0 < by_position[-1] < by_position[0] < 1
    cached = [a["meta_info"]["cached_tokens"] for a in answers[-16:]]
    if name != "hybrid-no-buffer":
        # Without a buffer SGLang keeps a state at the end of a request only, and branches find none.
        assert cached == [a["meta_info"]["cached_tokens"] for a in plain[-16:]]
        assert sum(c >= 256 for c in cached) == 15
    assert_same_states(name)


def assert_same_states(name: str) -> None:
    """Wherever both servers stood at the same length of the same request, its slot held the same state."""
    import torch

    ours, plain = ({path.name: path for path in states_of(n).glob("*.pt")} for n in (name, "hybrid-plain"))
    both = sorted(set(ours) & set(plain))
    # Four prompts of 40 new tokens, at about four tokens a step.
    assert len(both) >= 24
    for file in both:
        got, expected = torch.load(ours[file]), torch.load(plain[file])
        for part in ("temporal", "conv"):
            torch.testing.assert_close(got[part], expected[part], atol=1e-5, rtol=1e-5, msg=lambda m, f=file, p=part: f"{f} {p}: {m}")
