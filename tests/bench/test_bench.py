"""`sglang-dflash bench`: figures from made-up measurements, the client and the gate against fake servers, and one real small run."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

import numpy
import pytest

from sglang_dflash import cli
from sglang_dflash.bench import datasets, load, picture, report
from sglang_dflash.bench.arms import arms_of
from sglang_dflash.bench.datasets import Prompt
from sglang_dflash.bench.gate import Runs, differences
from sglang_dflash.bench.load import Answer, Pass, Speculation
from sglang_dflash.bench.settings import BLOCK_KINDS, ON_CPU, Settings
from sglang_dflash.checkpoint.embedded import demo_pair
from sglang_dflash.checkpoint.errors import ConfigError
from tests.bench.fake_server import FakeServer, Started

HARDWARE = {
    "date": "2026-01-02", "processor": "abacus", "cores": 2, "memory_gib": 4.0, "accelerator": None,
    "python": "3.11", "sglang": "1", "torch": "2",
}  # fmt: skip


def answer(
    tokens: int = 5,
    first: float = 0.5,
    seconds: float = 1.5,
    text: str = "a",
    ids: tuple[int, ...] | None = None,
) -> Answer:
    return Answer(text, ids, tokens, first, seconds)


def made_up(texts: list[str], seconds: float = 2.0) -> Pass:
    return Pass(seconds, [[answer(text=text)] for text in texts], Speculation(4, 10))


# ---- figures


@pytest.mark.parametrize("share", [0.0, 0.05, 0.5, 0.95, 1.0])
def test_percentiles_are_numpys(share: float) -> None:
    rng = random.Random(1)
    for length in (1, 2, 7, 20):
        values = [rng.random() for _ in range(length)]
        assert report.percentile(values, share) == pytest.approx(numpy.quantile(values, share))


def test_figures_of_two_rounds_are_those_of_all_their_answers() -> None:
    passes = [
        Pass(2.0, [[answer(5, 0.1, 0.5)], [answer(9, 0.3, 0.7)]], Speculation(3, 12)),
        Pass(3.0, [[answer(1, 0.2, 0.2)], [answer(5, 0.4, 1.2)]], Speculation(1, 2)),
    ]
    row = report.row(passes)
    assert (
        row["tokens"] == 20
        and row["seconds"] == 5.0
        and row["output_tok_s"] == 4.0
        and row["answers"] == 4
    )
    assert row["ttft_ms"] == 250 and row["acceptance_length"] == 3.5
    # Of the three answers with more than one token: 100, 50 and 200 ms per token after the first.
    assert row["tpot_ms"] == 100 and row["tpot_ms_p95"] == 190
    plain = report.row([Pass(1.0, [[answer(1, 0.1, 0.1)]], Speculation(0, 0))])
    assert plain["acceptance_length"] is None and plain["tpot_ms"] is None


def report_of(dtype: str, other: list[str]) -> dict[str, Any]:
    runs: Runs = {("demo", 2): {"ar": [made_up(["x", "y"], 4.0)], "dflash": [made_up(other, 2.0)]}}
    settings = Settings(
        dtype=dtype, command="sglang-dflash bench", num_prompts=2, concurrency="2"
    ).resolve(False)
    return report.summed_up(settings, ["ar", "dflash"], {"demo": 2}, runs, [], HARDWARE)


def test_the_report_shows_every_figure(tmp_path: Path) -> None:
    from PIL import Image

    result = report_of("float32", ["x", "y"])
    assert result["identical"] and [row["ratio"] for row in result["rows"]] == [1.0, 2.0]
    shown = report.markdown(result)
    assert "| demo | 2 | dflash | 5.0 | 2.0x | 500.0 (500.0) | 250.0 (250.0) | 2.5 |" in shown
    for part in (
        "2 of demo",
        "sglang-dflash bench",
        "2 cores of abacus",
        "2026-01-02",
        "embedded dense pair",
        "48 new tokens",
    ):
        assert part in shown, part
    assert report.table(result).row_count == 2
    picture.draw(result, tmp_path / "a.png")
    with Image.open(tmp_path / "a.png") as image:
        image.load()
        assert (
            image.format == "PNG"
            and min(image.size) > 300
            and len(image.getcolors(1 << 24) or ()) > 10
        )


def test_a_rounded_dtype_says_on_its_first_line_how_many_outputs_differ() -> None:
    assert (
        report.card(report_of("float32", ["x", "y"]))[0]
        == "outputs: the same in all arms (2 answers each, greedy, float32)"
    )
    result = report_of("bfloat16", ["x", "z"])
    assert (
        report.card(result)[0]
        == "outputs may differ from ar's by near-ties of bfloat16, and did for: dflash 1 of 2"
    )
    assert not result["identical"] and result["differing_answers"] == {"dflash": 1}


def test_differences_name_prompt_arm_and_place() -> None:
    def of(*ids: tuple[int, ...]) -> Pass:
        return Pass(1.0, [[answer(ids=one)] for one in ids], Speculation(0, 0))

    same = of((1, 2, 3), (4, 5))
    runs: Runs = {
        ("demo", 1): {
            "ar": [same, same],
            "b": [same, of((1, 2, 3), (4, 5, 6))],
            "c": [of((1, 9, 3), (4, 5)), same],
        }
    }
    found = differences(runs, "ar")
    assert [(d.arm, d.prompt, d.position, d.unit) for d in found] == [
        ("b", 1, 2, "token"),
        ("c", 0, 1, "token"),
    ]
    assert str(found[1]).startswith(
        "arm c, data set demo, prompt 0, concurrency 1: the answer differs from ar's from token 1 on"
    )
    # Without ids on one side it is the text that counts.
    mixed: Runs = {
        ("demo", 1): {
            "ar": [of((1, 2))],
            "b": [Pass(1.0, [[answer(text="ab")]], Speculation(0, 0))],
        }
    }
    assert [(d.position, d.unit) for d in differences(mixed, "ar")] == [(1, "character")]


# ---- arms


def test_arms_and_their_flags() -> None:
    asked = Settings(
        arm=("ar", "builtin", "dflash"),
        block_size=(4, 8),
        server_flags=("--page-size", "16"),
        concurrency="1,32",
    )
    arms = {arm.name: list(arm.flags) for arm in arms_of(asked.resolve(False), accelerator=False)}
    assert list(arms) == ["ar", "builtin@4", "builtin@8", "dflash@4", "dflash@8"]
    assert (
        "--speculative-algorithm" not in arms["ar"]
        and "--speculative-dflash-worker" not in arms["dflash@4"]
    )
    at = arms["builtin@4"].index("--speculative-dflash-worker")
    assert arms["builtin@4"][at + 1] == "builtin" and arms["dflash@8"][-4:] == [
        "--speculative-num-draft-tokens",
        "8",
        "--page-size",
        "16",
    ]
    own = Settings(target="T", draft="D", arm=("ngram", "dflash"), dtype="bfloat16").resolve(True)
    assert own.in_turn and own.levels == [1, 8, 16, 32]
    ngram, dflash = (list(arm.flags) for arm in arms_of(own, accelerator=True))
    assert (
        ngram[-2:] == ["--speculative-algorithm", "NGRAM"]
        and dflash[dflash.index("--speculative-draft-model-path") + 1] == "D"
    )
    assert dflash[:2] == ["--model-path", "T"] and dflash[dflash.index("--dtype") + 1] == "bfloat16"
    with pytest.raises(ConfigError, match="--arm: 'ngram' needs SGLang's compiled kernels"):
        arms_of(own, accelerator=False)


def test_simulation_reaches_arms_that_draft_and_weights_of_given_pairs() -> None:
    def served(
        *, model: str | None = None, simulated: float | None = 3.5, theirs: tuple[str, ...] = ()
    ) -> dict[str, tuple[bool, bool]]:
        pair = {"model": model} if model else {"target": "T", "draft": "D"}
        asked = Settings(
            **pair,
            arm=("ar", "dflash", "builtin"),
            simulated_acceptance=simulated,
            server_flags=theirs,
        )
        return {
            arm.name: (bool(arm.env), "dummy" in arm.flags)
            for arm in arms_of(asked.resolve(True), accelerator=True)
        }

    assert served() == {"ar": (False, True), **dict.fromkeys(BLOCK_KINDS, (True, True))}
    with_weights = {"ar": (False, False), **dict.fromkeys(BLOCK_KINDS, (True, False))}
    assert (
        served(model="hybrid") == with_weights
        and served(theirs=("--load-format=auto",)) == with_weights
    )
    assert served(simulated=None) == dict.fromkeys(("ar", *BLOCK_KINDS), (False, False))


def test_defaults_depend_on_the_machine() -> None:
    assert (ON_CPU.concurrency, Settings().resolve(False).arm) == ("1,8,16", ("ar", "dflash"))
    assert Settings().resolve(False).dtype == Settings().resolve(True).dtype == "float32"
    assert Settings(target="T", draft="D").resolve(True).dtype == "bfloat16"
    assert Settings(target="T", draft="D").resolve(False).dataset == ("stdlib",)
    assert not Settings(target="T", draft="D").resolve(False).in_turn


@pytest.mark.parametrize(
    "asked, message",
    [
        (["--arm", "magic"], "--arm: 'magic'; choose from ar, dflash"),
        (["--arm", "ar", "--arm", "ar"], "--arm: ar, ar; every name once"),
        (["--concurrency", "1,x"], "--concurrency: '1,x'"),
        (["--concurrency", "8,8"], "--concurrency: '8,8'"),
        (["--concurrency", "64"], "--concurrency: 64 clients, but demo has 16 prompts"),
        (["--num-prompts", "0"], "--num-prompts: 0"),
        (["--max-new-tokens", "-1"], "--max-new-tokens: -1"),
        (["--rounds", "0"], "--rounds: 0"),
        (["--block-size", "1"], "--block-size: 1;"),
        (["--block-size", "8", "--block-size", "8"], "--block-size: 8, 8; every size once"),
        (
            ["--simulated-acceptance", "0.5"],
            "--simulated-acceptance: 0.5; a verify step commits 1 token or more",
        ),
        (
            ["--simulated-acceptance", "nan"],
            "--simulated-acceptance: nan; a verify step commits 1 token or more",
        ),
        (
            ["--simulated-acceptance", "inf"],
            "--simulated-acceptance: inf; a verify step commits 1 token or more",
        ),
        (
            ["--simulated-acceptance", "4.5", "--block-size", "8", "--block-size", "4"],
            "--simulated-acceptance: 4.5; a verify step of block size 4 commits at most 4 tokens",
        ),
        (
            ["--simulated-acceptance", "9"],
            "--simulated-acceptance: 9; a verify step of block size 8 commits at most 8 tokens",
        ),
        (
            ["--simulated-acceptance", "2", "--base-url", "a=http://x"],
            "--simulated-acceptance: 2.0 is for servers that are started here",
        ),
        (
            ["--simulated-acceptance", "2", "--arm", "ar", "--arm", "ngram"],
            "--arm: 'ngram' drafts trees, and SGLang simulates chains only",
        ),
        (
            ["--simulated-acceptance", "2", "--arm", "ar"],
            "--simulated-acceptance: 2, but none of ar drafts; add --arm dflash or builtin",
        ),
        (
            ["--simulated-acceptance", "2", "--no-ignore-eos"],
            "--no-ignore-eos: with --simulated-acceptance an end means nothing",
        ),
        (["--model", "sparse"], "demo model: 'sparse'"),
        (["--target", "T"], "--target and --draft: one without the other"),
        (["--model", "dense", "--target", "T", "--draft", "D"], "--model: 'dense'"),
        (["--base-url", "http://x"], "--base-url: 'http://x'; NAME=URL"),
        (
            ["--base-url", "a=http://x", "--arm", "ar"],
            "--arm: ('ar',) is for servers that are started here",
        ),
        (
            ["--base-url", "a=http://x", "--", "--page-size", "1"],
            "flags after --: ('--page-size', '1')",
        ),
        (
            ["--dataset", "demo", "--dataset-file", "x"],
            "--dataset-file: 'x' stands instead of --dataset",
        ),
        (["--thinking", "on"], "--thinking: 'on', but none of demo, stdlib"),
        (["--arm", "ngram"], "--arm: 'ngram' needs"),
        (["--base-url", "a=http://127.0.0.1:9"], "http://127.0.0.1:9: neither SGLang nor"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_bad_input_is_refused_by_name(
    asked: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", "--out", str(tmp_path), *asked]) == 1
    shown = capsys.readouterr()
    assert not shown.out and shown.err.splitlines()[-1].startswith(f"sglang-dflash: {message}")


# ---- the client, the order, and the gate, against fake servers


def echo(prompt: Any) -> list[str]:
    return [f"{word} " for word in str(prompt).split()[:4]] + ["end"]


@pytest.mark.parametrize("sglang", [True, False])
def test_the_clock_of_the_first_token(sglang: bool) -> None:
    with FakeServer(
        "a", lambda _: ["x"] * 5, [], sglang=sglang, delay_s=0.3, piece_s=0.1
    ) as server:
        to = load.endpoint(server.base[2:] + "/v1")
        assert isinstance(to, load.SGLang if sglang else load.OpenAI)
        got = to.ask("hi", 5, True)
    assert (
        got.tokens == 5
        and got.text == "xxxxx"
        and (got.ids == (120,) * 5 if sglang else got.ids is None)
    )
    # The whole answer takes 0.7 s; a machine that is busy adds to it.
    assert (
        0.3 <= got.first_token_s < 0.7 <= got.seconds
        and got.per_token_s is not None
        and 0.09 < got.per_token_s < 0.5
    )


@pytest.mark.parametrize("incremental", [True, False])
def test_both_ways_of_streaming_tell_the_same(incremental: bool) -> None:
    with FakeServer("a", echo, [], sglang=True, incremental=incremental) as server:
        got = load.endpoint(server.base[2:]).ask("one two", 5, True)
    assert (
        (got.text, got.tokens, got.verify_steps) == ("one two end", 3, 1)
        and got.ids is not None
        and len(got.ids) == 3
    )


def test_a_pass_runs_so_many_at_a_time_and_counts_speculation() -> None:
    log: list[Any] = []
    prompts = [Prompt((f"p {i}",), False) for i in range(6)]
    for sglang, expected in ((True, Speculation(6, 12)), (False, Speculation(6, 18))):
        with FakeServer("a", echo, log, sglang=sglang, delay_s=0.2) as server:
            began = time.perf_counter()
            to = load.endpoint(server.base[2:])
            done = load.run(
                to, prompts, 3, lambda to, prompt, said: to.ask(prompt.turns[0], 8, True)
            )
            # Two waves of three.
            assert 0.4 <= done.seconds <= time.perf_counter() - began < 1.1
        assert [turns[0].text for turns in done.answers] == [f"p {i} end" for i in range(6)]
        assert done.speculation == expected and done.tokens == 18


def bench(capsys: pytest.CaptureFixture[str], out: Path, *asked: str) -> tuple[int, str, str]:
    code = cli.main(
        ["bench", "--out", str(out), "--num-prompts", "3", "--max-new-tokens", "9", *asked]
    )
    shown = capsys.readouterr()
    return code, shown.out, shown.err


def test_running_servers_are_compared_in_turns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log: list[Any] = []
    with FakeServer("sg", echo, log, sglang=True) as a, FakeServer("vllm", echo, log) as b:
        bases = ["--base-url", a.base, "--base-url", b.base]
        code, out, _ = bench(
            capsys, tmp_path / "out", *bases, "--concurrency", "1,3", "--rounds", "2"
        )
    assert code == 0
    result = json.loads(out.splitlines()[-1])
    assert json.loads((tmp_path / "out" / "results.json").read_text()) == result
    assert {"results.json", "table.md", "throughput.png"} == {
        p.name for p in (tmp_path / "out").iterdir()
    }
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
    assert [row["acceptance_length"] for row in result["rows"]][1::2] == [3.0, 3.0]
    order = [
        name
        for name, _, body in log
        if 9 in (body.get("max_tokens"), body.get("sampling_params", {}).get("max_new_tokens"))
    ]
    # Level by level: warm-up of both (as long as the answers here), then first one, then the other, then the other way round.
    assert order[:2] == ["sg", "vllm"] and order[2:14] == ["sg"] * 3 + ["vllm"] * 6 + ["sg"] * 3
    # Plain texts go on to the end that was asked for.
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

    def lies(prompt: Any) -> list[str]:
        return ["oops"] if prompt == prompts[1] else echo(prompt)

    with (
        FakeServer("true", echo, [], sglang=True) as a,
        FakeServer("false", lies, [], sglang=True) as b,
    ):
        bases = ["--base-url", a.base, "--base-url", b.base, "--concurrency", "1"]
        code, out, err = bench(capsys, tmp_path, *bases)
        assert code == 1 and not out and not list(tmp_path.iterdir())
        assert (
            "arm false, data set stdlib, prompt 1, concurrency 1: the answer differs from true's from token 0 on"
            in err
        )
        assert bench(capsys, tmp_path, *bases[:2], *bases[4:])[0] == 0
        # Where the dtype allows near-ties, they are counted: once per round.
        code, out, _ = bench(capsys, tmp_path, *bases, "--dtype", "bfloat16")
        assert code == 0 and "did for: false 2 of 6" in out.splitlines()[0]


SIMULATED = "acceptance is SIMULATED at 3 tokens per step: outputs are not the target's and were not compared"


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
        monkeypatch, tmp_path, capsys, "--simulated-acceptance", "3", *given, *arms
    )
    first = f"{SIMULATED}; weights are random, of the real shape"
    result = json.loads(out.splitlines()[-1])
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
    # Chats too go on to the end that was asked for, in every arm.
    assert all(
        body["sampling_params"]["ignore_eos"]
        for server in Started.made
        for _, _, body in server.asked
    )
    simulation = {
        "SGLANG_SIMULATE_ACC_LEN": "3",
        "SGLANG_SIMULATE_ACC_TOKEN_MODE": "real-draft-token",
    }
    assert [server.env for server in Started.made] == [{}, simulation, simulation]
    assert all(
        server.args[server.args.index("--load-format") + 1] == "dummy" for server in Started.made
    )
    # Three side by side share the memory; an embedded pair's are small by themselves.
    assert {
        server.args[server.args.index("--mem-fraction-static") + 1] for server in Started.made
    } == {"0.200"}


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
    missed = "simulated acceptance: not reached by dflash; the table says what was"
    assert code == 0 and out.splitlines()[:2] == [SIMULATED.replace("at 3", "at 8"), missed]
    assert not any(
        {"--load-format", "--mem-fraction-static"} & set(server.args) for server in Started.made
    )


def test_a_simulation_that_nobody_asked_for_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_SIMULATE_ACC_LEN", "5")
    with pytest.raises(
        ConfigError, match="SGLANG_SIMULATE_ACC_LEN: '5' would reach every server unseen"
    ):
        arms_of(Settings().resolve(False), accelerator=False)


def test_conversations_go_on_from_what_was_answered(
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
        assert "--target: missing" in bench(capsys, tmp_path / "out", *asked)[2]
        code, out, _ = bench(capsys, tmp_path / "out", *asked, "--target", str(target))
    assert code == 0 and json.loads(out.splitlines()[-1])["rows"][0]["answers"] == 2
    sent = AutoTokenizer.from_pretrained(target).decode(log[-1][1])
    said = [
        sent.find(part)
        for part in ("first question", "some answer", "second question", "assistant\n")
    ]
    assert said[:3] == sorted(said[:3]) and said[0] > 0 and sent.endswith("<|im_start|>assistant\n")
    # A chat ends where the model ends it.
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
