"""`python -m experiments`: the command, and fake experiments from arguments to result."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, cast

import pytest

from experiments import runner
from experiments.runner import Arms, Experiment, NoOptions, Progress, option
from sglang_dflash.bench.server import ServerConfig


class FakeServer:
    """In place of `Server`: notes starts and stops in `log`."""

    log: ClassVar[list[str]] = []

    def __init__(self, config: ServerConfig, timeout_s: float) -> None:
        del timeout_s
        self.name = str(config.flags["--name"])

    def start(self) -> None:
        self.log.append(f"start {self.name}")

    def wait(self) -> None:
        pass

    def stop(self) -> None:
        self.log.append(f"stop {self.name}")

    def __enter__(self) -> FakeServer:
        self.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.stop()

    def ask(self, times: int = 1) -> int:
        self.log.append(f"ask {self.name}")
        return times * len(self.name)


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr("sglang_dflash.bench.server.Server", FakeServer)
    monkeypatch.setattr(FakeServer, "log", [])
    return FakeServer.log


@dataclass(frozen=True)
class Options:
    rounds: int = option(2, "passes")
    two_words: str = option("some text", "a text", choices=["some text", "other"])


def arms(_: Options) -> Arms:
    return {name: ServerConfig({"--name": name}) for name in ("one", "three")}


def in_turns(arms: Arms, options: Options, progress: Progress) -> dict[str, list[int]]:
    with runner.all_at_once(arms) as servers:
        return runner.take_turns(
            servers, options.rounds, lambda name, i: cast(Any, servers[name]).ask(i + 1), progress
        )


def draw(result: dict[str, Any], path: Path) -> None:
    path.write_text(str(result["answers"]))


def experiment_of(name: str) -> Experiment[Any, Any]:
    return importlib.import_module(f"experiments.{name}").EXPERIMENT


def committed_results() -> list[tuple[list[str], dict[str, Any]]]:
    """Arguments of `python -m experiments` and the result of each."""
    found = []
    for path in sorted((runner.HOME / "results").glob("*.json")):
        result = json.loads(path.read_text())
        words = result["command"].split()
        if words[:3] == ["python", "-m", "experiments"]:
            found.append((words[3:], result))
    return found


FAKE: Experiment[Options, Any] = Experiment(
    name="fake",
    description="A fake.",
    options=Options,
    arms=arms,
    workload=in_turns,
    report=lambda measured, options: {"answers": measured, "rounds": options.rounds},
    table=lambda result: [f"table of {result['rounds']} rounds"],
    picture=draw,
    failure=lambda result: "too many rounds" if result["rounds"] > 3 else None,
)


def test_an_experiment_from_arguments_to_result(
    log: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new" / "fake.json"
    assert runner.run(FAKE, ["--rounds", "3", "--out", str(out)]) == 0
    shown = capsys.readouterr()
    lines = shown.out.splitlines()
    result = json.loads(lines[-1])
    assert json.loads(out.read_text()) == result
    assert result["command"] == "python -m experiments fake --rounds 3 --two-words 'some text'"
    assert {"date", "processor", "cores", "torch"} <= set(result["hardware"])
    assert result["answers"] == {"one": [3, 6, 9], "three": [5, 10, 15]}
    assert lines == ["table of 3 rounds", lines[-1]]
    assert "round 1 of 3: one" in shown.err and "5/6 [" in shown.err
    assert out.with_suffix(".png").read_text() == str(result["answers"])
    asked = ["ask one", "ask three", "ask three", "ask one", "ask one", "ask three"]
    assert log == ["start one", "start three", *asked, "stop one", "stop three"]


def test_a_result_that_does_not_hold_is_shown_and_fails(
    log: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert runner.run(FAKE, ["--rounds", "4"]) == 1
    shown = capsys.readouterr()
    assert json.loads(shown.out.splitlines()[-1])["rounds"] == 4
    assert shown.err.endswith("\nfake: too many rounds\n")


def test_servers_end_if_the_workload_fails(log: list[str]) -> None:
    def fails(arms: Arms, _: Options, __: Progress) -> None:
        with runner.all_at_once(arms):
            raise RuntimeError("made to fail")

    broken = Experiment("broken", "", fails, lambda *_: {}, options=Options, arms=arms)
    with pytest.raises(RuntimeError, match="made to fail"):
        runner.run(broken, [])
    assert log == ["start one", "start three", "stop one", "stop three"]


def test_one_server_after_another(log: list[str]) -> None:
    steps: list[tuple[str, int, int]] = []
    answers = runner.one_after_another(
        arms(Options()),
        lambda name, server: (name, cast(Any, server).ask()),
        lambda *step: steps.append(step),
    )
    assert answers == {"one": ("one", 3), "three": ("three", 5)}
    assert steps == [("one", 0, 2), ("three", 1, 2)]
    assert log == [f"{what} {name}" for name in answers for what in ("start", "ask", "stop")]


def test_an_experiment_without_options_servers_or_table(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def squares(arms: Arms, _: NoOptions, progress: Progress) -> dict[str, int]:
        assert not arms
        return runner.case_by_case({"two": 2, "three": 3}, lambda _, n: n * n, progress)

    plain = Experiment("plain", "", squares, lambda found, _: {"squares": found})
    assert runner.run(plain, []) == 0
    shown = capsys.readouterr()
    result = json.loads(shown.out)
    assert shown.err.index("two") < shown.err.index("three")
    assert result["squares"] == {"two": 4, "three": 9}
    assert result["command"] == "python -m experiments plain"


@pytest.mark.parametrize(
    "argv", [["--rounds", "x"], ["--two-words", "none"], ["--unknown"]], ids=" ".join
)
def test_a_wrong_option_is_refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        runner.run(FAKE, argv)
    assert exit_.value.code == 2 and argv[0] in capsys.readouterr().err


def test_the_list_names_every_experiment(capsys: pytest.CaptureFixture[str]) -> None:
    assert runner.main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    names = [line.split()[0] for line in lines]
    assert names == sorted(names) and {"gpu", "worker_overhead"} <= set(names)
    assert all(len(line.split()) > 5 for line in lines)


@pytest.mark.parametrize(
    "name, message",
    [
        ("worker_overhed", "no experiment 'worker_overhed'; did you mean worker_overhead?"),
        ("nonesuch", "no experiment 'nonesuch'; --list shows all"),
        (None, "an experiment is required; see --list"),
    ],
)
def test_an_unknown_name_is_refused_with_near_matches(
    name: str | None, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        runner.main([name] if name else [])
    shown = capsys.readouterr()
    assert exit_.value.code == 2 and message in shown.err and not shown.out


@pytest.mark.parametrize("name", runner.experiments())
def test_experiments_are_known_by_their_module(name: str) -> None:
    experiment = experiment_of(name)
    assert experiment.name == name
    assert experiment.description.startswith(runner.experiments()[name])
    options = experiment.options()
    configs = experiment.arms(options)
    # A second one of the same shows the noise.
    again = [arm for arm in configs if arm.endswith(" again")]
    assert len(set(configs.values())) == len(configs) - len(again)
    repeated = runner.command(experiment, options).split()[4:]
    assert runner._parser(experiment).parse_args(repeated).out is None


def test_a_configuration_error_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert runner.main(["worker_overhead", "--model", "sparse"]) == 1
    shown = capsys.readouterr()
    assert shown.err.startswith("worker_overhead: demo model: 'sparse'") and not shown.out


def test_committed_results_name_commands_that_parse() -> None:
    assert len(committed_results()) >= 9
    for (name, *argv), _ in committed_results():
        runner._parser(experiment_of(name)).parse_args(argv)


def test_the_list_and_the_gpu_experiment_need_neither_sglang_nor_requests() -> None:
    code = (
        "import sys; sys.modules['requests'] = sys.modules['sglang'] = None;"
        "from experiments import runner;"
        "assert runner.main(['--list']) == 0 and 'torch' not in sys.modules;"
        "import experiments.gpu;"
        "from sglang_dflash.bench.machine import hardware; assert hardware()['torch']"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=runner.HOME.parent)


def test_committed_results_have_a_table_and_hold() -> None:
    for (name, *_), result in committed_results():
        assert all(isinstance(line, str) for line in experiment_of(name).table(result))
        assert experiment_of(name).failure(result) is None


def test_reports_have_the_keys_of_the_committed_results() -> None:
    by_name = {name: result for (name, *_), result in committed_results()}
    tokens = by_name["target_kv_tokens"]
    counts = tokens["target_kv_tokens"]
    assert experiment_of("target_kv_tokens").report(counts, NoOptions()).items() <= tokens.items()
