"""`sglang-dflash inspect` reads a server's launch command."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import sglang.srt
from sglang.cli.utils import get_model_path

from sglang_dflash.serving.start.refused_settings import REFUSED_SWITCHES
from sglang_dflash.serving.start.server_flags import rows
from sglang_dflash.tools import cli
from sglang_dflash.tools.inspect import launch_command
from sglang_dflash.tools.inspect.launch_command import read
from tests.broken_drafts import BROKEN, server_flags
from tests.errors import refused
from tests.tools.inspect.pairs import inspected

CODE = BROKEN["field: code"]
TARGET, DRAFT = "Qwen/Qwen3.5-27B", "z-lab/Qwen3.5-27B-DFlash"
COMMAND = (
    f"python -m sglang.launch_server --model-path {TARGET} --speculative-algorithm DFLASH "
    f"--speculative-draft-model-path {DRAFT} --speculative-num-draft-tokens 8 --tp-size=2 "
    "--attention-backend triton --mem-fraction-static 0.75 --mamba-scheduler-strategy extra_buffer "
    "--speculative-dflash-width adaptive --speculative-draft-attention-backend torch_native "
    "--kv-cache-dtype fp8_e4m3 --max-running-requests 8 --context-length 65536 "
    "--speculative-dflash-draft-window-size 4096 --trust-remote-code"
).split()
WITHOUT_FRACTION = (
    "the command has no --mem-fraction-static: SGLang chooses a fraction by the GPU and the model, "
    "often a smaller one than the 0.9 of these figures"
)
OURS = (
    f"{TARGET} {DRAFT} --block-size 8 --tp-size 2 --mem-fraction 0.75 --kv-dtype fp8_e4m3 "
    "--max-running-requests 8 --context-length 65536 --window 4096 "
    "--width adaptive --attention-backend triton --draft-attention-backend torch"
).split()


def test_a_pasted_command_gives_the_figures_of_our_flags(
    capsys: pytest.CaptureFixture[str],
) -> None:
    expected = inspected(capsys, *OURS)
    ways = (
        ["--offline", "--json", "--", *COMMAND],
        # Without the program, and its flags directly.
        ["--offline", "--json", "--", *COMMAND[3:]],
        [*COMMAND[3:], "--json", "--offline"],
    )
    for words in ways:
        assert cli.main(["inspect", *words]) == 0
        assert json.loads(capsys.readouterr().out) == expected


def test_flags_of_a_file_are_the_commands(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    expected, path = inspected(capsys, *OURS), tmp_path / "server.yaml"
    flags = {"speculative-algorithm": "DFLASH", "tp": 4, "trust-remote-code": True}
    path.write_text(json.dumps(flags))
    rest = [word for word in COMMAND[3:] if word != "--trust-remote-code"]
    rest = rest[: rest.index(ALGORITHM)] + rest[rest.index(ALGORITHM) + 2 :]
    ways = (["--offline", "--json", "--", *rest], [*rest, "--json", "--offline"])
    for words in ways:
        assert cli.main(["inspect", *words, "--config", str(path)]) == 0
        assert json.loads(capsys.readouterr().out) == expected
    # The target, too, stands in it.
    path.write_text(json.dumps(dict.fromkeys(["model-path"], TARGET) | flags))
    where = rest.index("--model-path")
    rest = rest[:where] + rest[where + 2 :]
    assert cli.main(["inspect", "--config", str(path), *rest, "--json", "--offline"]) == 0
    assert json.loads(capsys.readouterr().out) == expected
    # `sglang serve` looks for it before it reads the file.
    with pytest.raises(Exception, match="--model-path is required"):
        get_model_path(["--config", str(path)])
    with refused("launch command", reason="`sglang serve` reads it from no file"):
        read(["sglang", "serve", "--config", str(path)])


def test_flags_that_change_the_figures_and_are_not_reckoned_are_told(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = [*COMMAND, "--dp-size", "2", "--quantization=w8a8_int8", "--dtype", "bfloat16"]
    assert cli.main(["inspect", "--offline", "--", *words]) == 0
    told = "warning: not part of the arithmetic: --dp-size 2, --quantization w8a8_int8\n"
    assert told in capsys.readouterr().out


@pytest.mark.parametrize("dtype", ["mxfp8", "nvfp4"])
def test_kv_in_a_dtype_that_is_not_reckoned_is_told(
    capsys: pytest.CaptureFixture[str], dtype: str
) -> None:
    """A server takes it."""
    words = [*COMMAND, "--kv-cache-dtype", dtype]
    assert cli.main(["inspect", "--offline", "--", *words]) == 0
    assert f"not part of the arithmetic: --kv-cache-dtype {dtype}\n" in capsys.readouterr().out


# Settings that SGLang's sizing of its pools reads, too: they change nothing here, or come with one
# that is told.
NO_EFFECT = {
    "chunked_prefill_size": "with --disable-radix-cache",
    "disaggregation_decode_extra_slots": "with --disaggregation-mode",
    "disaggregation_decode_retraction_backup": "with --disaggregation-mode",
    "enable_encoder_swa_bounded_replay": "of another target than a draft can have",
    "enable_linear_replayssm": "of decoding without drafts",
    "enable_linear_replayssm_spec": "of KDA layers",
    "linear_replayssm_cache_len": "of KDA layers",
    "enable_memory_saver": "SGLang's worker serves; of how memory is allocated",
    "enable_multi_layer_eagle": "of EAGLE",
    "enable_unified_memory": "SGLang's worker serves; of how memory is divided",
    "pp_size": "refused",
    "prefill_max_requests": "with --disaggregation-mode",
    "prefill_only_disable_kv_cache": "of embeddings",
    "speculative_algorithm": "DFLASH",
    "speculative_eagle_topk": "of EAGLE",
    "speculative_num_steps": "of EAGLE",
}
SIZING = (
    "mem_cache/kv_cache_configurator.py",
    "mem_cache/allocation_sizing.py",
    "model_executor/pool_configurator.py",
)


def test_every_setting_that_sglang_sizes_its_pools_by_is_read_or_told() -> None:
    code = "".join(Path(sglang.srt.__path__[0], name).read_text() for name in SIZING)
    getters = re.findall(r"\bget_\w+\(\)((?:\.\w+)+)", code)
    sized_by = {name for path in getters for name in path.split(".")}
    sized_by &= {row["name"] for row in rows()}
    known = {*launch_command.FLAGS, *launch_command.NOT_RECKONED, *REFUSED_SWITCHES}
    assert "page_size" in sized_by and sized_by - known == set(NO_EFFECT)


@pytest.mark.parametrize("flags", ["--attn-cp-size 2", "--attn-dp-size 2", "--moe-dp-size 2"])
def test_other_splits_of_the_model_are_told(flags: str) -> None:
    """SGLang's sizing reads what follows from them, such as `attn_tp_size`."""
    read = launch_command.read([*COMMAND, *flags.split(), "--enable-dp-lm-head"])
    assert flags in read.not_reckoned


def without(flag: str) -> list[str]:
    """The command without that flag and its value."""
    at = COMMAND.index(flag)
    return COMMAND[:at] + COMMAND[at + 2 :]


ALGORITHM, DRAFT_FLAG = "--speculative-algorithm", "--speculative-draft-model-path"
REFUSED = {
    "no target": (["sglang", "serve", "--tp-size", "2"], "missing; --model-path"),
    "no algorithm": (without(ALGORITHM), f"{ALGORITHM}: missing; without"),
    "another algorithm": ([*COMMAND, ALGORITHM, "EAGLE"], "inspect is about DFLASH"),
    "a slip in the algorithm": ([*COMMAND, ALGORITHM, "dflahs"], "'dflahs'; did you mean DFLASH?"),
    "unknown flags": (
        [*COMMAND, "--speculative-dflash-witdh", "adaptive", "--frobnicate", "3"],
        "no such flag; did you mean --speculative-dflash-width?; --frobnicate: there is no",
    ),
    "a flag of inspect": ([*COMMAND, "--kv-memory-gib", "16"], "--kv-memory-gib: there is no such"),
    "a word too many": (["sglang", "serve", TARGET, "again", *COMMAND[5:]], "again: more than the"),
    "an unknown choice": ([*COMMAND, "--kv-cache-dtype", "fp8_e4m"], "did you mean fp8_e4m3?"),
    "no number": ([*COMMAND, "--tp", "two"], "invalid int value: 'two'"),
    "no file of flags": ([*COMMAND, "--config", "no.yaml"], "'no.yaml'; cannot be read: No such"),
    "a file that is not read": ([*COMMAND, "--config=server.yaml"], "write --config FILE, as two"),
    "help": ([*COMMAND, "-h"], "--help: nothing is served"),
    "Ray": ([*COMMAND, "--use-ray"], "--use-ray: True; leave it out"),
    "a split prefill": ([*COMMAND, "--enable-pdmux"], "--enable-pdmux: True; leave it out"),
    "pipeline parallelism": ([*COMMAND, "--pp-size", "2"], "--pp-size: 2; SGLang refuses DFLASH"),
    "data-parallel attention": (
        [*COMMAND, "--enable-dp-attention", "--dp-size", "2"], "unless --enable-dp-lm-head is given"
    ),
    "two blocks": (
        [*COMMAND, "--speculative-dflash-block-size", "4"], "4; but --speculative-num-draft-tokens"
    ),
    "an adaptive width": ([*COMMAND, "--enable-lora"], "-width: 'adaptive'; has CUDA graphs"),
    "a trusted draft": ([*COMMAND, DRAFT_FLAG, TARGET], "with --trust-remote-code, not the target"),
    "a trusted tokenizer": (
        [*without(DRAFT_FLAG), "--tokenizer-path", DRAFT], "with --trust-remote-code, not the dra"
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_a_server_would_refuse_is_refused_in_one_line(
    capsys: pytest.CaptureFixture[str], what: str
) -> None:
    words, message = REFUSED[what]
    assert cli.main(["inspect", "--offline", "--", *words]) == 1
    told = capsys.readouterr()
    assert message in told.err and told.err.count("\n") == 1 and not told.out


@pytest.mark.parametrize("more", ["--device npu", "--enable-memory-saver --enable-lora"])
def test_a_server_that_falls_back_is_not_refused_for_what_our_worker_cannot(more: str) -> None:
    """It cannot adapt widths there, nor has a draft without a window rings."""
    window = COMMAND.index("--speculative-dflash-draft-window-size")
    words = [*COMMAND[:window], *COMMAND[window + 2 :], "--speculative-dflash-draft-kv-tokens", "9"]
    launch = read([*words, *more.split(), "--speculative-dflash-lookup", "on"])
    assert launch.builtin == " ".join(more.split()[: 2 if "npu" in more else 1])
    assert not {"--width", "--draft-kv-tokens", "--lookup"} & set(launch.words)


def test_a_draft_that_names_its_code_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Our worker and SGLang's refuse it, whatever is trusted of the target."""
    draft = CODE.make(tmp_path / "draft")
    command = ["sglang", "serve", *server_flags("--trust-remote-code", draft=draft)]
    for more in ([], ["--speculative-dflash-worker", "builtin"]):
        assert cli.main(["inspect", "--", *command, *more]) == 1
        told = capsys.readouterr()
        assert CODE.message in told.err and told.err.count("\n") == 1 and not told.out


def test_flags_in_short_and_numbers_with_units_are_a_servers(
    capsys: pytest.CaptureFixture[str],
) -> None:
    expected = inspected(capsys, TARGET, DRAFT, "--context-length", "64000", "--tp-size", "2")
    expected["warnings"].append(WITHOUT_FRACTION)
    short = f"--model {TARGET} --speculative-algo dflash --context-len 64k --tensor-parallel 2"
    serve = f"sglang serve {TARGET} {ALGORITHM} DFLASH --context-length=64k --tp 2"
    for words in (short.split(), serve.split()):
        assert cli.main(["inspect", "--offline", "--json", "--", *words]) == 0
        assert json.loads(capsys.readouterr().out) == expected


def test_the_fraction_is_the_commands_or_inspects(capsys: pytest.CaptureFixture[str]) -> None:
    words = [TARGET, DRAFT, ALGORITHM, "DFLASH"]
    command = ["--model-path", TARGET, "--speculative-draft-model-path", DRAFT, *words[2:]]
    given: tuple[tuple[list[str], list[str]], ...] = (
        ([], ["--mem-fraction-static", "0.8"]),
        (["--mem-fraction", "0.8"], []),
        (["--kv-memory-gib", "9"], []),
    )
    for own, servers in given:
        assert cli.main(["inspect", "--offline", *own, "--", *command, *servers]) == 0
        assert "no --mem-fraction-static" not in capsys.readouterr().out
    assert cli.main(["inspect", "--offline", "--json", "--", *command]) == 0
    assert json.loads(capsys.readouterr().out)["warnings"][-1] == WITHOUT_FRACTION


def test_every_setting_that_is_read_is_a_servers() -> None:
    names = {row["name"] for row in rows()}
    assert not {*launch_command.FLAGS, *launch_command.NOT_RECKONED} - names


def test_settings_of_sglangs_worker_are_known(capsys: pytest.CaptureFixture[str]) -> None:
    for flags, reason in (
        ("--enable-flexkv", "--enable-flexkv"),
        (
            "--enable-dp-attention --dp-size 2 --enable-dp-lm-head",
            "data-parallel attention (--enable-dp-attention)",
        ),
        ("--speculative-dflash-worker builtin", "--speculative-dflash-worker builtin"),
        ("--speculative-draft-model-quantization fp8", "--speculative-draft-model-quantization"),
    ):
        assert cli.main(["inspect", "--offline", "--json", "--", *COMMAND, *flags.split()]) == 0
        found = json.loads(capsys.readouterr().out)
        assert (found["worker"], found["worker_reason"]) == ("builtin", reason)
    assert launch_command.read([*COMMAND, "--pp-size", "1"]).builtin is None


def test_a_draft_attention_backend_that_cannot_serve_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A server refuses it, too; SGLang's worker has others."""
    flag = "--speculative-draft-attention-backend"
    words = ["inspect", "--offline", "--", *COMMAND]
    assert cli.main([*words, flag, "fa3"]) == 1
    message = f"{flag}: 'fa3'; serves draft K/V in bfloat16, float16, not in"
    assert message in capsys.readouterr().err
    assert cli.main([*words, flag, "flashinfer"]) == 0
    assert "served by SGLang's" in capsys.readouterr().out
