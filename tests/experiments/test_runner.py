"""`python -m experiments`: the command, its ways of running, and the committed results."""

from __future__ import annotations

import importlib
import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest

from experiments import draft_kv, gpu_servers, runner, target_kv_tokens
from sglang_dflash.tools.bench.server import ServerConfig

ARMS = {name: ServerConfig({"--name": name}) for name in ("one", "three")}


class FakeServer:
    """Stand-in for `Server`: notes starts and stops in `log`."""

    log: ClassVar[list[str]] = []

    def __init__(self, config: ServerConfig, timeout_s: float) -> None:
        self.name = str(config.flags["--name"])

    def start(self) -> None:
        self.log.append(f"start {self.name}")

    def wait(self) -> None:
        pass

    def stop(self, *_: Any) -> None:
        self.log.append(f"stop {self.name}")

    def __enter__(self) -> FakeServer:
        self.start()
        return self

    __exit__ = stop

    def ask(self, times: int = 1) -> int:
        self.log.append(f"ask {self.name}")
        return times * len(self.name)


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(runner, "Server", FakeServer)
    monkeypatch.setattr(FakeServer, "log", [])
    return FakeServer.log


def test_servers_side_by_side_take_turns_and_end(log: list[str]) -> None:
    with pytest.raises(RuntimeError, match="made to fail"), runner.all_at_once(ARMS) as servers:
        answers = runner.take_turns(servers, 3, lambda name, i: servers[name].ask(i + 1))  # type: ignore[attr-defined]
        raise RuntimeError("made to fail")
    assert answers == {"one": [3, 6, 9], "three": [5, 10, 15]}
    asked = ["ask one", "ask three", "ask three", "ask one", "ask one", "ask three"]
    assert log == ["start one", "start three", *asked, "stop three", "stop one"]


def test_one_server_after_another(log: list[str]) -> None:
    assert runner.one_after_another(ARMS, FakeServer.ask) == {"one": 3, "three": 5}
    assert log == [f"{what} {name}" for name in ARMS for what in ("start", "ask", "stop")]


def test_a_result_is_written_and_its_failure_tells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(draft_kv, "run", lambda options: {"rings": {}, "turns": options.turns})
    monkeypatch.setattr(draft_kv, "failure", lambda result: None)
    out = tmp_path / "new" / "rings.json"
    assert runner.main(["draft_kv", "--turns", "3", "--out", str(out)]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert json.loads(out.read_text()) == result and result["turns"] == 3
    assert result["command"] == "python -m experiments draft_kv --chats 32 --turns 3"
    assert {"date", "processor", "cores", "torch"} <= set(result["hardware"])
    monkeypatch.setattr(draft_kv, "failure", lambda result: "does not hold")
    assert runner.main(["draft_kv"]) == 1
    shown = capsys.readouterr()
    assert json.loads(shown.out.splitlines()[-1])["turns"] == 4
    assert shown.err == "draft_kv: does not hold\n"


def test_a_command_repeats_what_was_given_more_than_once() -> None:
    for variants in ((), ("a=--x 1", "b=--y")):
        command = runner.command_of("gpu_servers", gpu_servers.Options(variant=variants))
        args = runner.parser("gpu_servers").parse_args(shlex.split(command)[4:])
        assert tuple(getattr(args, "variant", ())) == variants


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["draft_kv", "--out", str(runner.HOME)], f"--out: '{runner.HOME}'; it cannot be written"),
        (["step_profile", "--base-url", "a=http://127.0.0.1:9/"], "http://127.0.0.1:9/generate: "),
    ],
)
def test_what_cannot_run_is_one_line(
    argv: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert runner.main(argv) == 1
    assert capsys.readouterr().err.startswith(f"{argv[0]}: {words}")


def test_an_option_out_of_range_is_named_by_its_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert runner.main(["worker_overhead", "--against", "revision", "--revision", "?"]) == 1
    shown = capsys.readouterr()
    assert shown.err.startswith("worker_overhead: --revision: '?'; ") and not shown.out


def test_the_help_lists_every_experiment(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in (["--help"], ["nonesuch"]):
        with pytest.raises(SystemExit) as ended:
            runner.main(argv)
        assert bool(ended.value.code) == (argv == ["nonesuch"])
    shown = capsys.readouterr()
    assert {"gpu_servers", "worker_overhead"} <= set(runner.experiments())
    assert all(name in shown.out and name in shown.err for name in runner.experiments())


def committed_results() -> list[tuple[list[str], dict[str, Any]]]:
    """Arguments of `python -m experiments` and the result of each."""
    results = [json.loads(p.read_text()) for p in sorted((runner.HOME / "results").glob("*.json"))]
    prefix = "python -m experiments "
    return [
        (shlex.split(result["command"].removeprefix(prefix)), result)
        for result in results
        if result["command"].startswith(prefix)
    ]


def test_committed_results_name_commands_that_parse_and_hold() -> None:
    assert len(committed_results()) >= 6
    for (name, *argv), result in committed_results():
        runner.parser(name).parse_args(argv)
        module = importlib.import_module(f"experiments.{name}")
        assert all(isinstance(line, str) for line in module.table(result))
        assert not hasattr(module, "failure") or module.failure(result) is None


def test_a_report_has_the_keys_of_the_committed_one(monkeypatch: pytest.MonkeyPatch) -> None:
    by_name = {name: result for (name, *_), result in committed_results()}
    tokens = by_name["target_kv_tokens"]
    monkeypatch.setattr(
        target_kv_tokens,
        "one_after_another",
        lambda arms, _: {name: tokens["target_kv_tokens"][name] for name in arms},
    )
    assert target_kv_tokens.run(runner.NoOptions()).items() <= tokens.items()


def test_the_list_needs_neither_sglang_nor_requests() -> None:
    code = (
        "import sys; sys.modules['requests'] = sys.modules['sglang'] = None;"
        "from experiments import runner;"
        "assert runner.experiments() and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=runner.HOME.parent)
