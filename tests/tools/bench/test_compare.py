"""`sglang-dflash bench` end to end against fake servers: order, gate, simulation, chats."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from sglang_dflash.tools import cli
from sglang_dflash.tools.bench import datasets, load, picture
from sglang_dflash.tools.demo_pairs.pairs import demo_pair
from tests.tools.bench.fake_server import Answer, FakeServer, Started, echo

Captured = pytest.CaptureFixture[str]


def bench(capsys: Captured, out: Path, *asked: str) -> tuple[int, str, str]:
    code = cli.main(
        ["bench", "--out", str(out), "--num-prompts", "3", "--max-new-tokens", "9", *asked]
    )
    shown = capsys.readouterr()
    return code, shown.out, shown.err


def urls(*servers: FakeServer) -> list[str]:
    return [word for one in servers for word in ("--base-url", f"{one.name}={one.url}")]


def read(out: Path) -> dict[str, Any]:
    return json.loads((out / "results.json").read_text())


def test_running_servers_are_compared_in_turns(tmp_path: Path, capsys: Captured) -> None:
    log: list[Any] = []
    with FakeServer("sg", echo, log, sglang=True) as a, FakeServer("vllm", echo, log) as b:
        asked = [*urls(a, b), "--concurrency", "1,3", "--rounds", "2"]
        code, out, err = bench(capsys, tmp_path / "new", *asked)
    result = read(tmp_path / "new")
    assert code == 0 and not [line for line in out.splitlines() if line.startswith("{")]
    assert {"results.json", "table.md"} == {p.name for p in (tmp_path / "new").iterdir()}
    assert (tmp_path / "new" / "table.md").read_text() in out
    # Without a terminal, lines.
    assert "/24 [" in err and "stdlib, 3 at a time: vllm, round 2 of 2" in err
    levels = [(row["concurrency"], row["arm"]) for row in result["rows"]]
    assert levels == [(1, "sg"), (1, "vllm"), (3, "sg"), (3, "vllm")]
    assert result["prefix_cache_kept"] == ["vllm"]
    # Level by level: warm-up of both, then one arm after the other, then in reverse order.
    order = [name for name, _, _ in log]
    assert order[:2] == ["sg", "vllm"] and order[2:14] == ["sg"] * 3 + ["vllm"] * 6 + ["sg"] * 3
    assert result["text"] is result["width"] is None
    # Plain texts are continued to the full length.
    assert all(body.get("sampling_params", body)["ignore_eos"] is True for _, _, body in log)


def test_one_arm_has_no_ratio_and_json_is_printed_alone(tmp_path: Path, capsys: Captured) -> None:
    with FakeServer("x", echo, [], sglang=True) as server:
        asked = [*urls(server), "--concurrency", "1", "--rounds", "1"]
        code, out, _ = bench(capsys, tmp_path / "a", *asked)
        assert code == 0 and "ratios:" not in out and "1.0x" not in out
        (row,) = read(tmp_path / "a")["rows"]
        cells = next(line for line in out.splitlines() if line.startswith("| stdlib "))
        cells = cells.split(" | ")
        assert row["ratio"] is None and cells[4] == "-"
        code, out, _ = bench(capsys, tmp_path / "b", *asked, "--json")
    assert code == 0 and json.loads(out) == read(tmp_path / "b")


def test_a_few_prompts_of_ones_own_repeat_and_the_report_says_so(
    tmp_path: Path, capsys: Captured
) -> None:
    log, file = list[Any](), tmp_path / "own.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"text {i}"}) + "\n" for i in range(4)))
    with FakeServer("sg", echo, log, sglang=True) as a:
        asked = [*urls(a), "--dataset-file", str(file), "--rounds", "1", "--concurrency"]
        code = cli.main(["bench", "--out", str(tmp_path / "a"), *asked, "8"])
        table, result = capsys.readouterr().out, read(tmp_path / "a")
        assert code == 0 and result["rows"][0]["answers"] == 8
        assert result["prompts"] == {"own": 8} and result["distinct_prompts"] == {"own": 4}
        assert "repeated: own has 4 prompts" in table and "prefix caches" in table
        # As many as are there, unless another number is asked for.
        assert cli.main(["bench", "--out", str(tmp_path / "b"), *asked, "1"]) == 0
        assert "repeated" not in capsys.readouterr().out
        assert read(tmp_path / "b")["rows"][0]["answers"] == 4
        assert (
            cli.main(["bench", "--out", str(tmp_path / "c"), *asked, "1", "--num-prompts", "6"])
            == 0
        )
        assert read(tmp_path / "c")["rows"][0]["answers"] == 6


def test_the_gate_lets_no_figure_out(tmp_path: Path, capsys: Captured) -> None:
    prompts = [prompt.turns[0] for prompt in datasets.load("stdlib", 3)]

    def wrong(prompt: Any) -> list[str]:
        return ["oops"] if prompt == prompts[1] else echo(prompt)

    with (
        FakeServer("true", echo, [], sglang=True) as a,
        FakeServer("false", wrong, [], sglang=True) as b,
    ):
        code, out, err = bench(capsys, tmp_path, *urls(a, b), "--concurrency", "1")
        assert code == 1 and not out and not list(tmp_path.iterdir())
        place = "arm false, data set stdlib, prompt 1, concurrency 1"
        assert f"{place}: the answer differs from true's from token 0 on" in err
        assert bench(capsys, tmp_path, *urls(a), "--concurrency", "1")[0] == 0
        # Where the dtype allows near-ties, or is not known, they are counted: once per round.
        for dtype, words in (
            ("bfloat16", "near-ties of bfloat16 and float32"),
            (None, "not known"),
        ):
            b.dtype = dtype
            code, out, _ = bench(capsys, tmp_path, *urls(a, b), "--concurrency", "1")
            assert code == 0 and words in out and "did for: false 3 of 9" in out.splitlines()[0]
            assert read(tmp_path)["differing_answers"] == {"false": 3}
        # So they are on a GPU.
        b.dtype, b.accelerator = "float32", "NVIDIA H100"
        code, out, _ = bench(capsys, tmp_path, *urls(a, b), "--concurrency", "1")
        assert code == 0 and "by near-ties of float32 on a GPU, and did for: false 3 of 9" in out
        b.dtype = None
        named = [*urls(a, b), "--concurrency", "1", "--dtype", "float32"]
        assert bench(capsys, tmp_path, *named)[0] == 1


def test_sampled_answers_are_compared_where_a_seed_decides_them(
    tmp_path: Path, capsys: Captured
) -> None:
    log, how = list[Any](), ["--temperature", "0.7", "--top-p", "0.9", "--seed", "5"]
    short = ["--concurrency", "1", "--rounds", "1", *how]

    def served(answer: Answer, deterministic: bool) -> FakeServer:
        return FakeServer("a", answer, log, sglang=True, deterministic=deterministic)

    with served(echo, True) as a, served(lambda _: ["oops"], True) as b:
        a.name, b.name = "true", "false"
        code, out, err = bench(capsys, tmp_path, *urls(a, b), *short)
        assert code == 1 and not out and "differs from true's from token 0 on" in err
        sent = [{k: body["sampling_params"][k] for k in ("temperature", "top_p", "sampling_seed")}
                for _, _, body in log]  # fmt: skip
        assert sent and all(
            one == {"temperature": 0.7, "top_p": 0.9, "sampling_seed": 5} for one in sent
        )
        b.answer = echo
        assert bench(capsys, tmp_path, *urls(a, b), *short)[0] == 0
        result, table = read(tmp_path), (tmp_path / "table.md").read_text()
        words = "temperature 0.7, top-p 0.9, seed 5"
        assert (
            result["outputs"] == f"outputs: the same in all arms (3 answers each, {words}, float32)"
        )
        assert "| acceptance length at temperature 0.7 |" in table
        # Elsewhere a seed may be ignored, so equal answers are not asked for.
        b.answer, b.deterministic = lambda _: ["oops"], False
        assert bench(capsys, tmp_path, *urls(a, b), *short)[0] == 0
        why = "samples of arms without --enable-deterministic-inference, and did for: false 3 of 3"
        assert why in read(tmp_path)["outputs"]


def test_labels_of_a_running_server_are_its_own_or_the_clients(
    tmp_path: Path, capsys: Captured
) -> None:
    """Nothing of a report is taken from this machine but what is marked as the client's."""
    asked = ["--concurrency", "1", "--rounds", "1", "--picture"]
    with FakeServer("mine", echo, [], sglang=True, dtype="bfloat16") as server:
        code, out, err = bench(capsys, tmp_path, *urls(server), *asked)
    told = "model me/m; worker plain decoding; dtype bfloat16; device CPU, 3 cores of an abacus; "
    lines = out.splitlines()
    assert code == 0 and f"- mine: {told}engine SGLang 9.8.7; torch 7.6.5" in lines
    assert "- outputs: not compared: one arm" in lines
    assert "asking mine" in err and "starting" not in err
    client = f"{os.cpu_count()} cores"
    assert all(line.startswith("- client: ") for line in lines[:-1] if client in line)
    result = read(tmp_path)
    own = {k for k, v in result["client"].items() if v is not None}
    assert result["servers"]["mine"]["dtype"] == "bfloat16" and {"cores", "date"} <= own
    (title,) = picture.title(result)
    assert "device CPU, 3 cores of an abacus; dtype bfloat16" in title and client not in title
    with FakeServer("vllm", echo, []) as server:
        code, out, _ = bench(capsys, tmp_path, *urls(server), *asked[:-1])
    told = "worker not known; dtype not known; device not known; engine not known; torch not known"
    assert code == 0 and f"- vllm: model fake; {told}" in out.splitlines()


def started_here(
    monkeypatch: pytest.MonkeyPatch, out: Path, capsys: Captured, *asked: str
) -> tuple[int, str, str]:
    # A GPU's servers do not compute in float32.
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("sglang_dflash.tools.bench.arms.ServerProcess", Started)
    monkeypatch.setattr(Started, "made", [])
    return bench(capsys, out, "--concurrency", "1", "--rounds", "1", "--dtype", "float32", *asked)


def test_a_simulated_acceptance_is_told_first_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    from matplotlib.figure import Figure

    titles, draw = [], Figure.suptitle
    monkeypatch.setattr(
        Figure, "suptitle", lambda self, text, **how: titles.append(text) or draw(self, text, **how)
    )
    pair, chats = demo_pair("dense"), tmp_path / "chats.jsonl"
    chats.write_text('{"turns": ["first question", "second question"]}\n')
    given = ["--target", str(pair.target), "--draft", str(pair.draft), "--dataset-file", str(chats)]
    arms = ["--arm", "ar", "--arm", "dflash", "--arm", "builtin"]
    # Too little for three of them at once.
    monkeypatch.setattr("sglang_dflash.tools.bench.arms.available_bytes", lambda: 9 << 30)
    code, out, _ = started_here(
        monkeypatch, tmp_path, capsys, "--simulated-acceptance", "3", "--picture", *given, *arms
    )
    first, result = out.splitlines()[0].removeprefix("- "), read(tmp_path)
    assert code == 0 and first.startswith("acceptance is SIMULATED at 3 tokens per step")
    assert " ".join(titles[0].split()).startswith(f"{first} Output")
    shown = (tmp_path / "table.md").read_text()
    assert shown.startswith(f"- {first}\n") and "| simulated acceptance length |" in shown
    assert "(throughput.png)" in shown and (tmp_path / "throughput.png").exists()
    assert result["simulated_acceptance"] == 3 and result["differing_answers"] is None
    assert [row["acceptance_length"] for row in result["rows"]] == [None, 3.0, 3.0]
    # Chats too are answered at full length, in every arm.
    asked = [body for server in Started.made for _, _, body in server.asked]
    assert all(body["sampling_params"]["ignore_eos"] for body in asked)
    # Per arm a warm-up and a round.
    assert "one server after another" in out
    assert [(server.beside, len(server.asked)) for server in Started.made] == [(0, 8)] * 3


def test_a_round_in_which_a_kernel_is_compiled_is_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    asked = ["--simulated-acceptance", "8", "--dataset", "stdlib", "--num-prompts", "3"]
    assert started_here(monkeypatch, tmp_path, capsys, *asked)[0] == 0
    # One to warm up, and a round of three.
    assert [len(server.asked) for server in Started.made] == [4, 4]
    for compiling, answers, compiled in (((0,), 4, 0), ((3, 6), 10, 0), ((1, 4, 7, 11, 12), 13, 2)):
        monkeypatch.setattr(Started, "compiling", compiling)
        assert started_here(monkeypatch, tmp_path, capsys, *asked)[0] == 0
        assert [len(server.asked) for server in Started.made] == [answers] * 2
        rows = read(tmp_path)["rows"]
        assert [row["compiled_while_measured"] for row in rows] == [compiled] * 2
        line = (
            "- compiled while measured: ar, stdlib, 1 at a time: 2 kernels; its tok/s are too low"
        )
        assert (line in (tmp_path / "table.md").read_text()) == (compiled > 0)


def test_the_compilations_of_a_running_server_are_not_known(
    tmp_path: Path, capsys: Captured
) -> None:
    with FakeServer("a", echo, [], sglang=True) as a, FakeServer("b", echo, []) as b:
        assert bench(capsys, tmp_path, *urls(a, b), "--concurrency", "1")[0] == 0
        assert {row["compiled_while_measured"] for row in read(tmp_path)["rows"]} == {None}


def test_a_start_is_shown_with_the_time_it_took_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    """No remaining time is made up from times that are not steady."""
    asked = ["--simulated-acceptance", "8"]
    _, _, first = started_here(monkeypatch, tmp_path, capsys, *asked)
    assert "starting ar, dflash: 0 s" in first and "the last time" not in first
    result = read(tmp_path)
    assert set(result["start_s"]) == {"ar", "dflash"}
    result["start_s"]["dflash"] = 94.4
    (tmp_path / "results.json").write_text(json.dumps(result))
    _, _, second = started_here(monkeypatch, tmp_path, capsys, *asked)
    assert "starting ar, dflash: 0 s, 94 s the last time" in second
    assert not re.search(r"\d<\d\d:", second)


def test_only_simulation_excuses_outputs_that_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    code, out, err = started_here(monkeypatch, tmp_path, capsys)
    assert code == 1 and not out and not list(tmp_path.iterdir())
    assert "the answer differs from ar's from token 0 on" in err
    # The servers of an embedded pair run side by side.
    assert [server.beside for server in Started.made] == [0, 1]
    assert started_here(monkeypatch, tmp_path, capsys, "--simulated-acceptance", "8")[0] == 0


def test_conversations_continue_from_the_answers(tmp_path: Path, capsys: Captured) -> None:
    target, log, chats = demo_pair("dense").target, list[Any](), tmp_path / "chats.jsonl"
    chats.write_text('{"turns": ["first question", "second question"]}\n')
    with FakeServer("a", lambda _: ["some ", "answer"], log) as server:
        asked = [*urls(server), "--dataset-file", str(chats), "--concurrency", "1", "--rounds", "1"]
        assert "--target: chats need" in bench(capsys, tmp_path, *asked)[2]
        code, _, _ = bench(capsys, tmp_path, *asked, "--target", str(target))
    assert code == 0 and read(tmp_path)["rows"][0]["answers"] == 6
    sent = AutoTokenizer.from_pretrained(target).decode(log[-1][1])
    parts = ("first question", "some answer", "second question", "<|im_start|>assistant\n")
    places = [sent.rfind(part) for part in parts]
    assert places[0] > 0 and places == sorted(places) and sent.endswith(parts[-1])
    # The model ends a chat.
    assert "ignore_eos" not in log[-1][2]


def test_a_refusing_or_breaking_server_is_named(tmp_path: Path, capsys: Captured) -> None:
    def breaks(_: Any) -> list[str]:
        raise ValueError("made to break")

    with (
        FakeServer("a", lambda _: [], [], sglang=True) as silent,
        FakeServer("b", breaks, []) as broken,
    ):
        broken.handle_error = lambda *_: None  # type: ignore[method-assign]
        for server, message in (
            (silent, "the stream holds 0 tokens"),
            (broken, "/v1/completions: "),
        ):
            code, out, err = bench(capsys, tmp_path, *urls(server), "--concurrency", "1")
            assert code == 1 and not out and message in err and server.url in err


def test_the_same_server_as_two_arms_is_within_noise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    """One pass of each is of any speed; what is printed is no speedup."""
    seconds = iter([1.0, 1.115, 1.05, 1.2, 0.9, 1.0])
    run = load.run

    def timed(*args: Any) -> load.BenchPass:
        done = run(*args)
        # The passes that are measured have a progress callback.
        return (
            done if len(args) < 5 else load.BenchPass(next(seconds), done.answers, done.speculation)
        )

    monkeypatch.setattr(load, "run", timed)
    with FakeServer("x", echo, [], sglang=True) as server:
        url = server.url
        asked = ["--base-url", f"one={url}", "--base-url", f"two={url}", "--concurrency", "1"]
        code, out, _ = bench(capsys, tmp_path, *asked, "--rounds", "3")
    first, second = read(tmp_path)["rows"]
    assert code == 0 and first["within_noise"] is None and second["within_noise"] is True
    assert second["output_tok_s_min"] < second["output_tok_s"] < second["output_tok_s_max"]
    assert f"~{second['ratio']}x" in out


def test_a_picture_that_cannot_be_drawn_is_refused_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    code, out, err = bench(capsys, tmp_path, "--picture")
    assert code == 1 and not out and "--picture: needs matplotlib" in err


def test_results_outlive_a_reader_that_stops_and_a_file_that_is_none(tmp_path: Path) -> None:
    """`bench --json | head -c 1` lost a run of hours."""
    (tmp_path / "results.json").write_text('{"start_s": {"ar"')  # Another run is writing it.
    with FakeServer("x", echo, [], sglang=True) as server:
        asked = [*urls(server), "--concurrency", "1", "--rounds", "1", "--num-prompts", "2"]
        command = [sys.executable, "-m", "sglang_dflash", "bench", "--json", "--out", str(tmp_path)]
        with subprocess.Popen([*command, *asked], stdout=subprocess.PIPE, text=True) as running:
            assert running.stdout is not None
            running.stdout.close()
    assert running.returncode == 0 and read(tmp_path)["rows"][0]["answers"] == 2
    assert {"results.json", "table.md"} == {p.name for p in tmp_path.iterdir()}


def test_results_that_cannot_be_written_are_refused_before_anything_runs(
    tmp_path: Path, capsys: Captured
) -> None:
    (tmp_path / "table.md").mkdir()
    code, out, err = bench(capsys, tmp_path, "--base-url", "a=http://127.0.0.1:9")
    assert code == 1 and not out and f"--out: '{tmp_path}/table.md'; it cannot be written" in err


@pytest.fixture
def _heard() -> Iterator[None]:
    """SIGINT is heard also in a session that was started in the background, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_heard")
def test_ctrl_c_is_one_line(tmp_path: Path, capsys: Captured) -> None:
    def interrupts(_: Any) -> list[str]:
        os.kill(os.getpid(), signal.SIGINT)
        return ["word"]

    with FakeServer("x", interrupts, [], sglang=True) as server:
        code, out, err = bench(capsys, tmp_path, *urls(server), "--concurrency", "1")
    assert code == 130 and not out and "Traceback" not in err
    assert err.endswith("\nsglang-dflash: interrupted\n") and not list(tmp_path.iterdir())
