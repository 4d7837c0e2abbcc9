"""`python -m experiments gpu_servers`: on servers that are not there, and folders of shapes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from experiments import gpu_servers, runner
from experiments.gpu_servers import (
    SESSION_TOKENS,
    Measured,
    cell,
    figures,
    last_lines,
    step_ms,
    steps_without_prefills,
)
from experiments.shapes import context_of, folder_of, write_draft_weights
from sglang_dflash.checkpoint.draft_config import DraftConfig
from sglang_dflash.checkpoint.origin import published_draft
from sglang_dflash.checkpoint.published import shipped
from sglang_dflash.checkpoint.target_config import TargetGeometry
from sglang_dflash.common.errors import ConfigError, Failed
from sglang_dflash.drafting.acceptance_length import VerifySteps
from sglang_dflash.drafting.weights import load_model
from sglang_dflash.tools.bench.load import Answer
from sglang_dflash.tools.bench.server import ServerConfig
from sglang_dflash.tools.demo_pairs.pairs import demo_pair
from tests.tools.bench.fake_server import Started

RUNNING = 32


class FakeServer(Started):
    """Writes a log, in which each answer has a prefill of its own, tells of `kv_tokens`, and does
    not start as SGLang's worker."""

    def __init__(self, config: ServerConfig, timeout_s: float, log: Path) -> None:
        super().__init__(config, timeout_s)
        self.kv_tokens, self.running_requests = 2 * SESSION_TOKENS + 5, RUNNING
        self.has_tokenizer = "--skip-tokenizer-init" not in config.args()
        self.fails = "builtin" in config.flags.values()
        self.log = log
        log.write_text(f"first line\nDecode batch\n1%\r99%\r\n{'x' * 999}\n")

    def __enter__(self) -> FakeServer:
        if self.fails:
            raise Failed("the server ended with status 1:\nand so on")
        self.start()
        return self

    def words(self, answer: list[str]) -> list[str]:
        with self.log.open("a") as log:
            log.write("[2026-11-27 21:55:37] Prefill batch, #new-seq: 1\n")
        return super().words(answer)

    def start(self) -> None:
        super(Started, self).__enter__()

    def __exit__(self, *_: Any) -> None:
        super(Started, self).__exit__()


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    def little(folder: Path) -> None:
        (folder / "model.safetensors").touch()

    # The weights of a published draft are gigabytes.
    monkeypatch.setattr(gpu_servers, "write_draft_weights", little)
    monkeypatch.setattr(gpu_servers, "Server", FakeServer)
    monkeypatch.setattr(Started, "made", [])
    return Started.made


def test_a_server_that_fails_is_reported_and_the_others_go_on(
    servers: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "servers.json"
    argv = ["gpu_servers", "--concurrency", "1,3", "--prompt-tokens", "7"]
    argv += ["--flags", "--page-size 2", "--out", str(out)]
    assert runner.main(argv) == 1
    shown = capsys.readouterr()
    result = json.loads(out.read_text())
    assert json.loads(shown.out.splitlines()[-1]) == result
    assert shown.err.endswith("gpu_servers: failed: builtin\n")
    plain, builtin, ours = (result["servers"][name] for name in ("ar", "builtin", "dflash"))
    assert builtin["failed"] == "the server ended with status 1:" and "levels" not in builtin
    assert set(plain["levels"]) == {"1", "3"} and ours["levels"]["3"]["tokens_per_second"] > 0
    # Ten words, nine of them in three steps.
    assert ours["levels"]["1"]["acceptance_length"] == 3.0
    # Four prompts, in each of two passes.
    assert ours["levels"]["3"]["prefill_batches_of_passes"] == [4, 4]
    assert plain["kv_tokens"] == 2 * SESSION_TOKENS + 5 and plain["sessions"] == 2
    assert result["speedup"]["builtin"] == result["step_time_ratio"]["dflash"] == {}
    assert set(result["speedup"]["dflash"]) == {"1", "3"}
    for server in (plain, builtin, ours):
        assert server["log"] == ["first line", "99%", "x" * 300]
        assert server["flags"][-2:] == ["--page-size", "2"]
    table = shown.out.splitlines()
    assert "  first line" in table and "builtin: the server ended with status 1:" in table
    (row,) = [line for line in table if line.startswith("| builtin")]
    assert row == "| builtin | - | - | - | - |"


def test_all_servers_get_the_same_and_random_prompts(servers: list[Any]) -> None:
    argv = ["gpu_servers", "--arms", "ar,dflash", "--concurrency", "2", "--prompt-tokens", "7"]
    assert runner.main(argv) == 0
    asked = [[prompt for _, prompt, _ in server.asked] for server in servers]
    # A pass to warm up and two that count, in any order.
    assert [len(prompts) for prompts in asked] == [4 * 3] * 2
    first, second = ({tuple(prompt) for prompt in prompts} for prompts in asked)
    assert first == second and len(first) == 4 and all(len(prompt) == 7 for prompt in first)
    for server in servers:
        flags = server.config.args()
        assert {"dummy", "--skip-tokenizer-init", "bfloat16"} <= set(flags)
        # The draft's; the target's is longer, and SGLang's worker refuses that.
        assert flags[flags.index("--context-length") + 1] == "40960"
        (env,) = {server.config.env.get("SGLANG_SIMULATE_ACC_LEN")}
        assert env == ("4" if "--speculative-algorithm" in flags else None)


def test_a_variant_is_ours_with_further_flags(
    servers: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["gpu_servers", "--arms", "ar", "--concurrency", "1", "--prompt-tokens", "7"]
    assert runner.main([*argv, "--flags", "--page-size 2", "--variant", "wide=--page-size 4"]) == 0
    plain, wide = (server.config.args() for server in servers)
    assert plain[-2:] == ["--page-size", "2"]
    assert wide[-4:] == ["--page-size", "2", "--page-size", "4"] and "DFLASH" in wide
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(result["servers"]) == {"ar", "wide"} and "1" in result["speedup"]["wide"]


def test_a_pass_in_which_a_kernel_is_compiled_is_measured_again(
    servers: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A pass has four answers: the one to warm up, then each of two up to four times."""
    argv = ["gpu_servers", "--arms", "dflash", "--concurrency", "1", "--prompt-tokens", "7"]
    for compiling, passes, compiled in (
        ((0, 3), 3, 0),
        ((5,), 4, 0),
        ((4, 5, 9, 14), 6, 0),
        ((4, 8, 12, 17, 19, 20), 7, 2),
    ):
        servers.clear()
        monkeypatch.setattr(FakeServer, "compiling", compiling)
        assert runner.main(argv) == 0
        *table, last = capsys.readouterr().out.splitlines()
        (server,) = servers
        assert len(server.asked) == 4 * passes, compiling
        figures = json.loads(last)["servers"]["dflash"]["levels"]["1"]
        assert figures["compiled_while_measured"] == compiled
        assert len(figures["tokens_per_second_of_passes"]) == 2
        told = "dflash, 1 at a time: 2 kernels compiled while measured"
        assert (told in table) == (compiled == 2)
        assert {body["sampling_params"]["max_new_tokens"] for _, _, body in server.asked} == {128}


def test_what_does_not_start_a_server_is_refused(
    servers: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    for argv, words in {
        ("--arms", "ar,ours"): "--arms: 'ar,ours'; ",
        ("--concurrency", "0"): "--concurrency: '0'; ",
        ("--simulated-acceptance", "0.5"): "--simulated-acceptance: 0.5; ",
        ("--variant", "--page-size 2"): "--variant: '--page-size 2'; ",
        ("--variant", "builtin=--page-size 2"): "--variant: ",
        ("--variant", "a=--page-size 2", "--variant", "a=--page-size 4"): "--variant: ",
        ("--target", "some/Model"): "--draft: ",
        ("--target", "some/Model", "--draft", "z-lab/Qwen3-8B-DFlash-b16"): "--target: ",
    }.items():
        assert runner.main(["gpu_servers", *argv]) == 1
        assert capsys.readouterr().err.startswith(f"gpu_servers: {words}")
    assert not servers


@pytest.mark.parametrize(
    ("tokens", "running", "sessions"), [(None, 8, 0), (65535, 8, 0), (9 * 65536, 8, 8)]
)
def test_sessions_that_fit(tokens: int | None, running: int, sessions: int) -> None:
    with FakeServer.__base__(ServerConfig(), 1.0) as server:  # type: ignore[misc]
        server.kv_tokens, server.running_requests = tokens, running
        told = gpu_servers.read_report(gpu_servers.load.SGLang(server.url))
    assert (told["kv_tokens"], told["sessions"]) == (tokens or 0, sessions)


def test_the_time_of_a_step() -> None:
    """A plain answer's steps are its tokens but the prefill's."""
    plain, drafted = (Answer("", None, 9, 1.0, 1.8, steps) for steps in (0, 2))
    assert (step_ms(plain), step_ms(drafted)) == (pytest.approx(100), pytest.approx(400))


def streamed(sent: float, *chunks_at: float) -> Answer:
    times = chunks_at[0] - sent, chunks_at[-1] - sent
    return Answer("", None, len(chunks_at), *times, chunks_at=chunks_at)


def test_steps_without_prefills() -> None:
    """The second answer is sent between the first one's chunks at 2 and 3, and gets its first token
    between those at 4 and 5: those three steps wait for a prefill, and only those."""
    first, second = streamed(0, 1, 2, 3, 4, 5, 5.5), streamed(2.5, 4.25, 5)
    assert steps_without_prefills([first, second]) == [1000, 500, 750]
    # One at a time, an answer meets no prefill but its own.
    assert steps_without_prefills([streamed(0, 5, 6), streamed(6, 7, 9)]) == [1000, 2000]
    assert steps_without_prefills([Answer("", None, 9, 1.0, 1.8)]) == []


def measured(*answers: list[Answer], prefill_batches: int = 2) -> Measured:
    return Measured(9.0, list(answers), VerifySteps(), prefill_batches=prefill_batches)


def test_times_of_a_level() -> None:
    passes = [
        measured([streamed(0, 3, 5)], [streamed(6, 7, 8)]),
        measured([streamed(0, 2, 6)], prefill_batches=3),
    ]
    row = figures(passes)
    assert row["first_token_ms"] == 2000 and row["step_without_prefills_ms"] == 2000
    assert row["first_token_ms_of_passes"] == [[1000, 3000], [2000]]
    assert row["prefill_batches_of_passes"] == [2, 3]
    result = {"servers": {"ours": {"levels": {"1": row}}}, "speedup": {"ours": {"1": 2}}}
    assert cell(result, "ours", "1") == "0.3, 2.00x (2000.00, 2000.00; 2000.00)"
    # No step of these two is free of the other's prefill.
    waiting = figures([measured([streamed(0, 1, 4)], [streamed(0, 4, 5.5)])])
    assert waiting["step_without_prefills_ms"] == 1500
    row = figures([measured([streamed(0, 1, 4)], [streamed(0, 4)])])
    assert row["step_without_prefills_ms"] is None and row["first_token_ms"] == 2500
    result["servers"]["ours"]["levels"]["1"] = row
    assert cell(result, "ours", "1").endswith(", -; 2500.00)")


def test_a_log_that_is_not_there_has_no_lines(tmp_path: Path) -> None:
    assert last_lines(tmp_path / "no.log") == []


def test_the_context_is_that_of_the_shortest(tmp_path: Path) -> None:
    def folder(name: str, **config: Any) -> Path:
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
        return tmp_path / name

    nested = folder("nested", text_config={"max_position_embeddings": 4096})
    flat, silent = folder("flat", max_position_embeddings=8192), folder("silent")
    assert context_of([flat, silent, nested]) == 4096
    assert context_of([flat, silent]) == 8192 and context_of([silent]) is None


def test_folders_have_the_published_shapes(tmp_path: Path) -> None:
    refused = set()
    for name, facts in shipped("target").items():
        try:
            folder = folder_of("target", name, tmp_path)
        except ConfigError as error:
            refused.add((error.field, name))
            continue
        assert TargetGeometry.from_pretrained(folder) == TargetGeometry.from_dict(facts.config)
        config = json.loads((folder / "config.json").read_text())
        # SGLang's own classes read what those of Transformers forget.
        text = facts.config.get("text_config", facts.config)
        assert text.keys() <= config.keys(), name
        assert config["architectures"] and config["dtype"] == "bfloat16"
        assert config["max_position_embeddings"] >= 32768
    assert refused == {
        ("target", "moonshotai/Kimi-K2.5"),
        ("target", "meta-models/Muse-Glimmer-30B"),
    }
    dense, hybrid = published_draft("Qwen/Qwen3-8B"), published_draft("Qwen/Qwen3.5-27B")
    windows = {dense: None, hybrid: 4096}
    for name in windows:
        folder = folder_of("draft", name, tmp_path)
        assert DraftConfig.from_pretrained(folder) == DraftConfig.from_dict(
            shipped("draft")[name].config
        )
        assert AutoConfig.from_pretrained(folder).sliding_window == windows[name]
    with pytest.raises(ConfigError, match="mask_token_id"):
        folder_of("draft", "z-lab/LLaMA3.1-8B-Instruct-DFlash-UltraChat", tmp_path)
    own = demo_pair("dense").target
    assert folder_of("target", str(own), tmp_path) == own


def test_a_draft_gets_the_weights_that_our_worker_makes_up(tmp_path: Path) -> None:
    """Then SGLang's worker, which reads them, drafts the same tokens."""
    config = json.loads((demo_pair("dense").draft / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    write_draft_weights(tmp_path)
    read, made_up = (
        load_model(tmp_path, dtype=torch.bfloat16, dummy=dummy) for dummy in (False, True)
    )
    for name, tensor in made_up.state_dict().items():
        assert read.state_dict()[name].equal(tensor), name


def test_every_server_reads_the_draft(servers: list[Any]) -> None:
    argv = ["gpu_servers", "--concurrency", "1", "--prompt-tokens", "7"]
    runner.main(argv)
    assert len(servers) == 3
    for server in servers:
        flags = server.config.args()
        assert flags[flags.index("--speculative-draft-load-format") + 1] == "auto"
