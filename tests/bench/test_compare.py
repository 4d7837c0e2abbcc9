"""`sglang-dflash bench` end to end against fake servers: order, gate, simulation, chats."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sglang_dflash import cli
from sglang_dflash.bench import datasets
from sglang_dflash.facts.embedded import demo_pair
from tests.bench.fake_server import FakeServer, Started, echo


def bench(capsys: pytest.CaptureFixture[str], out: Path, *asked: str) -> tuple[int, str, str]:
    code = cli.main(
        ["bench", "--out", str(out), "--num-prompts", "3", "--max-new-tokens", "9", *asked]
    )
    shown = capsys.readouterr()
    return code, shown.out, shown.err


def read(out: Path) -> dict[str, Any]:
    return json.loads((out / "results.json").read_text())


def test_running_servers_are_compared_in_turns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log: list[Any] = []
    with FakeServer("sg", echo, log, sglang=True) as a, FakeServer("vllm", echo, log) as b:
        bases = ["--base-url", a.base, "--base-url", b.base]
        code, out, err = bench(
            capsys, tmp_path / "out", *bases, "--concurrency", "1,3", "--rounds", "2"
        )
    assert code == 0
    result = read(tmp_path / "out")
    assert {"results.json", "table.md"} == {p.name for p in (tmp_path / "out").iterdir()}
    # Without a terminal, lines.
    assert "/24 [" in err and "stdlib, 3 at a time: vllm, round 2 of 2" in err
    assert [(row["concurrency"], row["arm"]) for row in result["rows"]] == [
        (1, "sg"),
        (1, "vllm"),
        (3, "sg"),
        (3, "vllm"),
    ]
    assert (
        result["prefix_cache_kept"] == ["vllm"]
        and "could not be emptied between passes on vllm" in out
    )
    # vLLM's count includes tokens that a request does not keep: it is not called ours.
    assert [row.get("vllm_acceptance_length") for row in result["rows"]] == [None, 3.0, None, 3.0]
    assert [row["acceptance_length"] for row in result["rows"]][1::2] == [None, None]
    assert "3.0 (vLLM's count)" in (tmp_path / "out" / "table.md").read_text()
    order = [
        name
        for name, _, body in log
        if 9 in (body.get("max_tokens"), body.get("sampling_params", {}).get("max_new_tokens"))
    ]
    # Level by level: warm-up of both (as long as the answers here), then one arm after the other,
    # then in reverse order.
    assert order[:2] == ["sg", "vllm"] and order[2:14] == ["sg"] * 3 + ["vllm"] * 6 + ["sg"] * 3
    # Plain texts are continued to the full length.
    assert (
        log[-1][2].get("ignore_eos", log[-1][2].get("sampling_params", {}).get("ignore_eos"))
        is True
    )


def test_one_server_after_another(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log: list[Any] = []
    with FakeServer("a", echo, log, sglang=True) as a, FakeServer("b", echo, log, sglang=True) as b:
        asked = [
            "--base-url",
            a.base,
            "--base-url",
            b.base,
            "--concurrency",
            "1,2",
            "--rounds",
            "2",
            "--in-turn",
        ]
        code, out, _ = bench(capsys, tmp_path, *asked)
    assert code == 0 and "one server after another" in out
    names = [name for name, _, _ in log]
    # Per level a warm-up of as many prompts as clients, then two rounds of three.
    assert names == ["a"] * (1 + 6 + 2 + 6) + ["b"] * (1 + 6 + 2 + 6)


def test_the_gate_lets_no_figure_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = [prompt.turns[0] for prompt in datasets.load("stdlib", 3, model=None, cache=Path())]

    def wrong(prompt: Any) -> list[str]:
        return ["oops"] if prompt == prompts[1] else echo(prompt)

    with (
        FakeServer("true", echo, [], sglang=True) as a,
        FakeServer("false", wrong, [], sglang=True) as b,
    ):
        bases = ["--base-url", a.base, "--base-url", b.base, "--concurrency", "1"]
        code, out, err = bench(capsys, tmp_path, *bases)
        assert code == 1 and not out and not list(tmp_path.iterdir())
        assert (
            "arm false, data set stdlib, prompt 1, concurrency 1: "
            "the answer differs from true's from token 0 on" in err
        )
        assert bench(capsys, tmp_path, *bases[:2], *bases[4:])[0] == 0
        # Where the dtype allows near-ties, they are counted: once per round.
        code, out, _ = bench(capsys, tmp_path, *bases, "--dtype", "bfloat16")
        assert code == 0 and "did for: false 3 of 9" in out.splitlines()[0]


SIMULATED = (
    "acceptance is SIMULATED at 3 tokens per step: "
    "outputs are not the target's and were not compared"
)


def started_here(
    monkeypatch: pytest.MonkeyPatch, out: Path, capsys: pytest.CaptureFixture[str], *asked: str
) -> tuple[int, str, str]:
    monkeypatch.setattr("sglang_dflash.bench.arms.Server", Started)
    monkeypatch.setattr(Started, "made", [])
    return bench(capsys, out, "--concurrency", "1", "--rounds", "1", "--dtype", "float32", *asked)


def test_a_simulated_acceptance_is_told_first_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from matplotlib.figure import Figure

    titles, draw = [], Figure.suptitle
    monkeypatch.setattr(
        Figure, "suptitle", lambda self, text, **how: titles.append(text) or draw(self, text, **how)
    )
    pair = demo_pair("dense")
    (tmp_path / "chats.jsonl").write_text('{"turns": ["first question", "second question"]}\n')
    given = [
        "--target",
        str(pair.target),
        "--draft",
        str(pair.draft),
        "--dataset-file",
        str(tmp_path / "chats.jsonl"),
    ]
    arms = ["--arm", "ar", "--arm", "dflash", "--arm", "builtin"]
    code, out, _ = started_here(
        monkeypatch, tmp_path, capsys, "--simulated-acceptance", "3", "--picture", *given, *arms
    )
    first = f"{SIMULATED}; weights are random, of the real shape"
    result = read(tmp_path)
    assert (
        code == 0
        and out.splitlines()[0] == result["outputs"] == first
        and " ".join(titles[0].split()).startswith(f"{first} Output")
    )
    shown, heads = (tmp_path / "table.md").read_text(), out.partition("┏")[2].partition("┡")[0]
    assert (
        shown.splitlines()[0] == f"- {first}"
        and "| simulated acceptance length |" in shown
        and "simulated" in heads
    )
    assert (
        result["simulated_acceptance"] == 3
        and result["identical"] is None
        and result["differing_answers"] is None
    )
    assert [row["acceptance_length"] for row in result["rows"]] == [None, 3.0, 3.0] and not result[
        "below_simulated_acceptance"
    ]
    # Chats too are answered at full length, in every arm.
    assert all(
        body["sampling_params"]["ignore_eos"]
        for server in Started.made
        for _, _, body in server.asked
    )
    simulation = {
        "SGLANG_SIMULATE_ACC_LEN": "3",
        "SGLANG_SIMULATE_ACC_TOKEN_MODE": "real-draft-token",
    }
    configs = [server.config for server in Started.made]
    assert [config.env for config in configs] == [{}, simulation, simulation]
    assert all(config.flags["--load-format"] == "dummy" for config in configs)
    # Three side by side share the memory; an embedded pair's are small by themselves.
    assert {config.flags["--mem-fraction-static"] for config in configs} == {"0.200"}


def test_only_simulation_excuses_outputs_that_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = started_here(monkeypatch, tmp_path, capsys)
    assert (
        code == 1
        and not out
        and "the answer differs from ar's from token 0 on" in err
        and not list(tmp_path.iterdir())
    )
    # An embedded pair has its weights; eight tokens per step are not what these servers do.
    code, out, _ = started_here(monkeypatch, tmp_path, capsys, "--simulated-acceptance", "8")
    missed = "simulated acceptance: not reached by dflash; the table shows what was reached"
    assert code == 0 and out.splitlines()[:2] == [SIMULATED.replace("at 3", "at 8"), missed]
    assert not any(
        {"--load-format", "--mem-fraction-static"} & set(server.config.flags)
        for server in Started.made
    )


def test_conversations_continue_from_the_answers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoTokenizer

    target, log = demo_pair("dense").target, list[Any]()
    (tmp_path / "chats.jsonl").write_text('{"turns": ["first question", "second question"]}\n')
    with FakeServer("a", lambda _: ["some ", "answer"], log) as server:
        asked = [
            "--base-url",
            server.base,
            "--dataset-file",
            str(tmp_path / "chats.jsonl"),
            "--concurrency",
            "1",
            "--rounds",
            "1",
        ]
        assert "--target: chats need" in bench(capsys, tmp_path / "out", *asked)[2]
        code, _, _ = bench(capsys, tmp_path / "out", *asked, "--target", str(target))
    assert code == 0 and read(tmp_path / "out")["rows"][0]["answers"] == 2
    sent = AutoTokenizer.from_pretrained(target).decode(log[-1][1])
    positions = [
        sent.find(part)
        for part in ("first question", "some answer", "second question", "assistant\n")
    ]
    assert (
        positions[:3] == sorted(positions[:3])
        and positions[0] > 0
        and sent.endswith("<|im_start|>assistant\n")
    )
    # The model ends a chat.
    assert "ignore_eos" not in log[-1][2]


def test_a_refusing_or_breaking_server_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def breaks(_: Any) -> list[str]:
        raise ValueError("made to break")

    with (
        FakeServer("a", lambda _: [], [], sglang=True) as silent,
        FakeServer("b", breaks, []) as broken,
    ):
        for server, message in (
            (silent, "the stream holds 0 tokens"),
            (broken, "/v1/completions: "),
        ):
            broken.handle_error = lambda *_: None  # type: ignore[method-assign]
            code, out, err = bench(
                capsys, tmp_path, "--base-url", server.base, "--concurrency", "1"
            )
            assert code == 1 and not out and message in err and server.base.partition("=")[2] in err


def test_the_same_server_as_two_arms_is_within_noise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One pass of each is of any speed; what is printed is no speedup."""
    from sglang_dflash.bench import load

    seconds = iter([1.0, 1.115, 1.05, 1.2, 0.9, 1.0])
    run = load.run

    def timed(*args: Any) -> load.Pass:
        done = run(*args)
        # The passes that are measured have a progress callback.
        return (
            done if len(args) < 5 else load.Pass(next(seconds), *(done.answers, done.speculation))
        )

    monkeypatch.setattr(load, "run", timed)
    with FakeServer("x", echo, [], sglang=True) as server:
        url = server.base[2:]
        asked = ["--base-url", f"one={url}", "--base-url", f"two={url}", "--concurrency", "1"]
        code, out, _ = bench(capsys, tmp_path, *asked, "--rounds", "3")
    first, second = read(tmp_path)["rows"]
    assert code == 0 and first["within_noise"] is None and second["within_noise"] is True
    assert second["output_tok_s_min"] < second["output_tok_s"] < second["output_tok_s_max"]
    assert f"~{second['ratio']}x" in out


def test_the_report_as_json_and_as_a_line_of_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import sys

    # A picture was not asked for.
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    runs = tmp_path / "new" / "runs.jsonl"
    with FakeServer("x", echo, [], sglang=True) as server:
        asked = ["--base-url", server.base, "--rounds", "1", "--output-file", str(runs)]
        asked += ["--request-rate", "50", "--seed", "3"]
        shown = [bench(capsys, tmp_path, *asked, "--json")[1] for _ in range(2)]
        code, out, err = bench(capsys, tmp_path, *asked, "--picture")
    assert [json.loads(line) for line in runs.read_text().splitlines()] == list(
        map(json.loads, shown)
    )
    result = json.loads(shown[0])
    assert (result["request_rate"], result["seed"], result["rows"][0]["concurrency"]) == (50, 3, 3)
    assert code == 1 and not out and "--picture: needs matplotlib" in err
