"""Flags: each combination is served, warned of, or refused in one line that names the flag."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from os.path import basename
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.arg_groups.overrides import resolving_view

from sglang_dflash.common.errors import ConfigError
from sglang_dflash.serving.start import check_pair, flags
from sglang_dflash.serving.start.server_flags import REMOVED, settings_of
from sglang_dflash.tools.demo_pairs.pairs import demo_pair
from tests.broken_drafts import PAIR, BrokenDraft, fields, server_flags
from tests.conftest import FUZZ
from tests.errors import refused
from tests.serving.published import Arrived

BLOCK, BLOCK_ALIAS = "--speculative-num-draft-tokens", "--speculative-dflash-block-size"
WINDOW, WINDOW_ALIAS = (
    "--speculative-draft-window-size", "--speculative-dflash-draft-window-size",
)  # fmt: skip
SINKS = "--speculative-draft-sink-size"
ENTRIES = "--speculative-dflash-draft-kv-tokens"
STATES_ALIAS = "--mamba-scheduler-strategy"
HUGE = "99999999999"
HYBRID = demo_pair("hybrid")
RECURRENT = server_flags(target=HYBRID.target, draft=HYBRID.draft)

# Flags -> the one that the error names, and its value; ... for none.
REFUSED: dict[tuple[str, ...], tuple[str, object]] = {
    **{(BLOCK, text): (BLOCK, int(text)) for text in ("0", "1", "-8", HUGE, "129")},
    **{(BLOCK_ALIAS, text): (BLOCK_ALIAS, int(text)) for text in ("0", "1", HUGE, "129")},
    (BLOCK, "16", BLOCK_ALIAS, "8"): (BLOCK_ALIAS, 8),
    (BLOCK, "0", BLOCK_ALIAS, "8"): (BLOCK_ALIAS, 8),
    (BLOCK, "64", "--max-total-tokens", "255"): (BLOCK, 64),
    ("--max-total-tokens", "31"): ("block_size of the draft", 8),
    ("--max-total-tokens", "7"): ("block_size of the draft", 8),
    (BLOCK_ALIAS, "64", "--context-length", "100"): (BLOCK_ALIAS, 64),
    **{(WINDOW, text): (WINDOW, int(text)) for text in ("0", "-64", "7", HUGE)},
    (WINDOW_ALIAS, "7"): (WINDOW, 7),
    (WINDOW, "15", BLOCK, "16"): (WINDOW, 15),
    (WINDOW, "64", SINKS, HUGE): (SINKS, int(HUGE)),
    (WINDOW, "64", SINKS, "-1"): (SINKS, -1),
    (SINKS, "4"): (SINKS, 4),
    ("--tp-size", "0"): ("--tp-size", 0),
    ("--tp-size", "-1"): ("--tp-size", -1),
    (ENTRIES, "999"): (ENTRIES, 999),
    (ENTRIES, "0"): (ENTRIES, 0),
    (WINDOW, "64", ENTRIES, HUGE): (ENTRIES, int(HUGE)),
    ("--tp-size", "3"): ("--tp-size", 3),
    ("--use-ray",): ("--use-ray", True),
    ("--enable-pdmux", "--disable-overlap-schedule", "--chunked-prefill-size", "-1"): (
        "--enable-pdmux",
        True,
    ),
    (*RECURRENT, "--enable-streaming-session"): ("--enable-streaming-session", ...),
    # The platform's.
    ("--enable-lora", "--lora-backend", "triton"): ("--lora-backend", "triton"),
    ("--moe-runner-backend", "cutlass"): ("--moe-runner-backend", "cutlass"),
    ("--tp-size", "2", "--dcp-size", "2"): ("--dcp-size", 2),
    ("--enable-hierarchical-cache", "--hicache-mem-layout", "page_head"): (
        "--hicache-mem-layout",
        "page_head",
    ),
}

# Flags -> the end of argparse's message.
REFUSED_BY_THE_PARSER: dict[tuple[str, ...], str] = {
    (STATES_ALIAS, "bogus"): "'bogus'; choose one of ",
    (WINDOW_ALIAS, "many"): "invalid int value: 'many'",
    (ENTRIES, "1e3"): "invalid int value: '1e3'",
    ("--speculative-dflash-worker", "mine"): "'mine'; choose one of ",
    ("--speculative-dflash-recurrent-rollback", "undo"): "'undo'; choose one of ",
}

SERVED: list[list[str]] = [
    [],
    [BLOCK, "8", BLOCK_ALIAS, "8"],
    [BLOCK, "128"],
    [WINDOW, "4", WINDOW_ALIAS, "64"],
    [WINDOW, "64", SINKS, "0"],
    [WINDOW_ALIAS, "64", ENTRIES, "999"],
    [STATES_ALIAS, "no_buffer"],
]


@pytest.mark.parametrize("flags", REFUSED, ids=lambda flags: " ".join(map(basename, flags)))
def test_flags_that_cannot_work_are_refused(
    flags: tuple[str, ...], resolve: Callable[..., Any]
) -> None:
    with refused(*REFUSED[flags]):
        resolve(server_flags(*flags))


def test_a_block_of_the_draft_that_two_requests_have_no_room_for(
    resolve: Callable[..., Any], tmp_path: Path
) -> None:
    draft = BrokenDraft(fields(block_size=10_000), "").make(tmp_path / "draft")
    with refused("block_size of the draft", 10_000):
        resolve(server_flags("--max-total-tokens", "32768", draft=draft))


@pytest.mark.parametrize("flags", REFUSED_BY_THE_PARSER, ids=" ".join)
def test_the_parser_refuses_values_that_are_none(
    flags: tuple[str, ...], resolve: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        resolve(server_flags(*flags))
    assert ended.value.code == 2
    assert REFUSED_BY_THE_PARSER[flags] in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("flags", SERVED, ids=" ".join)
def test_flags_that_work_are_served(flags: list[str], resolve: Callable[..., Any]) -> None:
    resolve(server_flags(*flags))


TARGET, DRAFT = server_flags()[:2], server_flags()[4:]
WIDTH, WORKERS = ["--speculative-dflash-width", "adaptive"], ["--tokenizer-worker-num", "2"]
BUILTIN = ["--speculative-dflash-worker", "builtin"]
GUARD = "request guard does not run"
# Flags of a server, what it is warned of, with which flags more, and the beginning of the line.
WARNED: dict[str, tuple[list[str], str, list[str], str]] = {
    "plain": (TARGET, "no effect without --spec", WIDTH, "--speculative-dflash-width: "),
    **{
        f"{worker[0]} {more[0]}": (
            server_flags(*worker),
            "no effect with SGLang's",
            more,
            f"{more[0]}: ",
        )
        for worker in (BUILTIN, ["--enable-memory-saver"])
        for more in (WIDTH, [ENTRIES, "999"])
    },
    "no algorithm": (TARGET, "no effect without --spec", DRAFT, f"{DRAFT[0]} has "),
    **{
        flags[0]: (server_flags(), why, flags, f"{flags[0]}: no effect: ")
        for why, flags in {
            "drafts are accepted so that sampled": ["--speculative-accept-threshold-single", "0.9"],
            "plain decoding's distribution": ["--speculative-accept-threshold-acc", "0.5"],
            "for EAGLE only": ["--speculative-use-rejection-sampling"],
            "from safetensors files": ["--speculative-draft-load-format", "npcache"],
            "no experts": ["--speculative-moe-runner-backend", "triton"],
            "drafts of other kinds": ["--speculative-ngram-capacity", "100"],
        }.items()
    },
    "workers": (server_flags(), GUARD, WORKERS, "--tokenizer-worker-num 2: SGLang loads no plug"),
}


# Our worker cannot adapt widths there, and does not serve there.
FALLS_BACK = [
    {"device": "npu"},
    {"device": "cuda", "enable_lora": True, "enable_memory_saver": True},
    {"enable_deterministic_inference": True, "enable_memory_saver": True},
]


@pytest.mark.parametrize("settings", FALLS_BACK, ids=" ".join)
def test_a_server_that_falls_back_is_not_refused_for_what_our_worker_cannot(
    settings: dict[str, Any], resolve: Callable[..., Any], capfd: pytest.CaptureFixture[str]
) -> None:
    given = resolve(server_flags(*WIDTH))
    check_pair._check(given, Arrived(resolving_view(given), settings))
    (line,) = [line for line in capfd.readouterr().err.splitlines() if "no effect" in line]
    assert f"{WIDTH[0]}: no effect with SGLang's built-in worker (" in line


@pytest.mark.parametrize("name", WARNED)
def test_what_does_not_work_as_expected_is_warned_of_in_one_line(
    name: str, resolve: Callable[..., Any], capfd: pytest.CaptureFixture[str]
) -> None:
    flags, warning, more, begins = WARNED[name]
    for argv, warned in ((flags, False), ([*flags, *more], True)):
        resolve(argv)
        lines = [line for line in capfd.readouterr().err.splitlines() if warning in line]
        assert len(lines) == warned and (not warned or begins in lines[0])


@pytest.mark.parametrize(
    "flags",
    [
        ["--speculative-accept-threshold-acc", "1.0", "--speculative-draft-load-format", "dummy"],
        ["--speculative-accept-threshold-acc", "0.5", *BUILTIN],
    ],
)
def test_defaults_and_another_workers_flags_are_not_warned_of(
    flags: list[str], resolve: Callable[..., Any], capfd: pytest.CaptureFixture[str]
) -> None:
    resolve(server_flags(*flags))
    assert "no effect" not in capfd.readouterr().err


@pytest.mark.parametrize("loaded", [True, False], ids=["repairs", "worker only"])
def test_tokenizer_workers_have_no_guard_to_lose_without_the_repairs(
    loaded: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(flags, "is_loaded", lambda plugin: loaded and plugin == "dflash_repairs")
    flags.warn_unguarded(1)
    assert not caplog.text
    # They load no plugins.
    flags.warn_unguarded(2)
    assert ("--tokenizer-worker-num 2" in caplog.text) == loaded


@pytest.mark.parametrize("value", ["on", "off"])
@pytest.mark.parametrize("name", REMOVED)
def test_a_removed_flag_is_refused_with_what_to_do_instead(
    name: str, value: str, resolve: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """By a server, by `inspect` of its command, and by an engine in a process."""
    flag = f"--{name.replace('_', '-')}"
    told = f"{flag}: this flag was removed; {REMOVED[name]}"
    for typed in ([flag, value], [f"{flag}={value}"]):
        with pytest.raises(SystemExit) as ended:
            resolve(server_flags(*typed))
        assert ended.value.code == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.endswith(f": {told}")
        with pytest.raises(ConfigError) as refused:
            settings_of(server_flags(*typed))
        assert refused.value.required == told
    with pytest.raises(ConfigError) as refused:
        flags.server_args_from_kwargs(model_path="m", **{name: value})
    assert (refused.value.field, refused.value.value) == (name, value)
    assert REMOVED[name] in str(refused.value)


def test_keyword_arguments_of_an_engine_are_checked_too() -> None:
    make = flags.server_args_from_kwargs
    made = make(model_path="m", speculative_dflash_draft_window_size=128)
    assert made.speculative_draft_window_size == 128
    pair = {
        "model_path": str(PAIR.target),
        "speculative_algorithm": "DFLASH",
        "speculative_draft_model_path": str(PAIR.draft),
    }
    for value in ("16", 16.0, True):
        with refused(BLOCK, value):
            make(**pair, speculative_num_draft_tokens=value).resolve_once()


NUMBERS = ["-1", "0", "1", "2", "7", "8", "16", "64", "129", "1000", HUGE, "x", "", "1.5"]
FLAGS = [BLOCK, BLOCK_ALIAS, WINDOW, SINKS, ENTRIES]


@settings(max_examples=80 * FUZZ, deadline=None, derandomize=True)
@given(typed=st.lists(st.tuples(st.sampled_from(FLAGS), st.sampled_from(NUMBERS)), max_size=4))
def test_any_flags_are_served_or_refused_in_one_line(
    typed: list[tuple[str, str]], parser: argparse.ArgumentParser
) -> None:
    from sglang.srt.server_args import ServerArgs

    flags = [word for pair in typed for word in pair]
    try:
        check_pair.check_pair(ServerArgs.from_cli_args(parser.parse_args(server_flags(*flags))))
    except SystemExit as ended:
        assert ended.code == 2
    except ConfigError as refused:
        assert "\n" not in str(refused)
        assert any(flag in str(refused) for flag in flags[::2])
