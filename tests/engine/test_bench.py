"""`sglang-dflash bench` on real servers, which it starts itself. The rest: tests/tools/bench."""

from __future__ import annotations

import functools
import json
import re
import shlex
from pathlib import Path

import pytest
import torch
from PIL import Image

from sglang_dflash.tools import cli
from sglang_dflash.tools.bench import arms, load, published
from sglang_dflash.tools.bench.differences import Difference, near_tie
from sglang_dflash.tools.bench.server import Server
from tests.engine.client import counts
from tests.engine.nursery import ForkedServer
from tests.engine.servers import DFLASH, PAGE16_NO_OVERLAP, PAIR
from tests.engine.session import ServerSession


def test_two_servers_side_by_side(
    servers: ServerSession,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    servers.stop()
    monkeypatch.setattr(arms, "ServerProcess", functools.partial(ForkedServer, servers.nursery))
    asked = "--arm ar --arm dflash --dataset demo --num-prompts 2 --max-new-tokens 16 --rounds 1"
    command = ["bench", *asked.split(), "--concurrency", "1,2", "--picture", "--out", str(tmp_path)]
    assert cli.main(command) == 0
    out = capsys.readouterr().out
    lines = out.splitlines()
    result = json.loads((tmp_path / "results.json").read_text())
    on_gpu = torch.cuda.is_available()
    assert on_gpu or "--speculative-dflash-width auto" in lines[0]
    assert lines[not on_gpu] == "- outputs: the same in all arms (4 answers each, greedy, float32)"
    assert (tmp_path / "table.md").read_text().startswith(out.strip())
    assert result["differing_answers"] == {"dflash": 0}
    levels = [(row["concurrency"], row["arm"]) for row in result["rows"]]
    assert levels == [(1, "ar"), (1, "dflash"), (2, "ar"), (2, "dflash")]
    for row in result["rows"]:
        assert row["tokens"] == 32 and row["output_tok_s"] > 0
        assert 0 < row["ttft_ms"] <= row["ttft_ms_p95"]
        length = row["acceptance_length"]
        assert length is None if row["arm"] == "ar" else 2 < length <= 8
    assert {"date", "processor", "cores"} <= set(result["client"])
    assert {one["dtype"] for one in result["servers"].values()} == {"float32"}
    assert set(result["start_s"]) == {"ar", "dflash"}
    assert result["command"].startswith("sglang-dflash bench") and not result["prefix_cache_kept"]
    with Image.open(tmp_path / "throughput.png") as image:
        image.load()
        assert image.format == "PNG"


# Its requests have seeds, which a server warns of once.
@pytest.mark.server(PAGE16_NO_OVERLAP)
def test_the_published_benchmark_measures_a_running_server(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    command = (
        f"--backend sglang --base-url {server.url} --model {PAIR.target} --dataset demo "
        f"--num-prompts 4 --concurrency 1 --enable-thinking --max-new-tokens 64 --output-file {out}"
    )
    before = counts(server)
    assert published.main(shlex.split(command)) == 0
    answers = json.loads(out.read_text())["answers"]
    (length,) = re.findall(r"Accept length: +([\d.]+)", capsys.readouterr().out)
    # One prompt warms the server up, and is asked again.
    assert len(answers) == 4
    assert float(length) == pytest.approx((counts(server) - before).acceptance_length, rel=0.1)


@pytest.mark.server(DFLASH)
def test_a_gap_is_that_of_the_answer(server: Server) -> None:
    """Asked for after a text and the beginning of an answer to it."""
    (text, *_), after = PAIR.prompts, 5
    ask = {"return_logprob": True, "top_logprobs_num": 2, "text": text}
    sampling = {"temperature": 0, "max_new_tokens": after + 1, "ignore_eos": True}
    body = {**ask, "sampling_params": sampling}
    made = load.send_request("POST", f"{server.url}/generate", json=body).json()
    first, second = (one[0] for one in made["meta_info"]["output_top_logprobs"][after])
    answer = load.SGLang(server.url).ask(text, after + 1, ignore_eos=True)
    assert list(answer.ids or ()) == made["output_ids"]
    at = Difference("b", "a", "demo", 0, 1, (), answer, after, True)
    arms = {"a": load.SGLang(server.url), "b": load.SGLang(server.url)}
    found = near_tie(at, text, arms, is_float32=True)
    assert found is not None and found.gaps["a"] == found.gaps["b"]
    assert found.gaps["a"] == pytest.approx(first - second, abs=1e-3)
