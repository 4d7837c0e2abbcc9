"""Results of SGLang's argument resolution with our plugin loaded, and the worker that serves a
pair."""

from __future__ import annotations

import argparse
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from sglang.srt.arg_groups.overrides import resolving_view
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from sglang_dflash.patches.patch import PatchError
from sglang_dflash.plugins.platform_cpu import OVERLAP
from sglang_dflash.serving.gpu.backends import ATTENTION
from sglang_dflash.serving.start import flags
from sglang_dflash.serving.start.choose_worker import unserved
from sglang_dflash.tools import cli
from sglang_dflash.tools.demo_pairs.pairs import demo_pair
from tests.broken_drafts import BrokenDraft, fields, server_flags
from tests.serving.published import Arrived, serving
from tests.speculators import rewrite_in_that_layout

PAIR = demo_pair("dense")


@pytest.mark.parametrize("device", [[], ["--device", "cpu"]], ids=["default", "device-cpu"])
def test_defaults_of_the_cpu_platform(device: list[str], resolve: Any) -> None:
    settings = resolving_view(resolve(server_flags(*device)))
    assert settings.attention_backend == "torch_native" and settings.sampling_backend == "pytorch"
    assert settings.sleep_on_idle and settings.disable_overlap_schedule


def test_overlap_can_be_tested_on_a_cpu(resolve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(OVERLAP, "1")
    assert not resolving_view(resolve(server_flags())).disable_overlap_schedule


def test_another_drafter_head_goes_to_the_built_in_worker_with_one_warning(
    resolve: Any, tmp_path: Path, capfd: Any
) -> None:
    domino = {"shift_label": True, "pure_draft_prefix_len": 1, "gru_hidden_dim": 8, "emb_dim": 8}
    other_head = fields({"projector_type": "domino", **domino})
    draft = BrokenDraft(other_head, "").make(tmp_path / "draft")
    # That worker reads it, and so it is no reason to refuse (MiMo has one).
    (draft / "mask_embedding.pt").write_bytes(b"")
    reason = "'domino'; not served here: a head"
    assert serving(resolve(server_flags(draft=draft))) == "builtin"
    lines = capfd.readouterr().err.splitlines()
    (warned,) = [line for line in lines if "built-in worker serves instead" in line]
    assert reason in warned
    assert cli.main(["inspect", str(PAIR.target), str(draft), "--offline"]) == 0
    shown = " ".join(capfd.readouterr().out.split())
    assert f"dflash_config.projector_type in the draft's config.json: {reason}" in shown


def test_a_draft_in_the_layout_of_speculators_is_served(resolve: Any, tmp_path: Path) -> None:
    """SGLang reads its config.json too, and does not know that layout."""
    draft = Path(shutil.copytree(PAIR.draft, tmp_path / "draft"))
    (file,) = PAIR.target.glob("*.safetensors")
    rows = load_file(file)["model.embed_tokens.weight"]
    rewrite_in_that_layout(draft, rows, 2 * torch.arange(512))
    worker = SpeculativeAlgorithm.DFLASH.create_worker(resolve(server_flags(draft=draft)))
    _, load_draft = worker.args
    assert load_draft.args == (str(draft),)


DRAFT_BACKEND = "--speculative-draft-attention-backend"
# The warning's words -> the setting as SGLang resolves it, and its value.
NOT_OURS: dict[str, dict[str, Any]] = {
    "data-parallel attention (--enable-dp-attention)": {"attn_dp_size": 2},
    "--attn-cp-size above 1": {"attn_cp_size": 2},
    "--dcp-size above 1": {"dcp_size": 2},
    "--pp-size above 1": {"pp_size": 2},
    "--disaggregation-mode decode with --enable-hierarchical-cache": {
        "disaggregation_mode": "decode",
        "enable_hierarchical_cache": True,
    },
    "--disaggregation-transfer-backend other than mooncake and nixl": {
        "disaggregation_mode": "decode",
        "disaggregation_transfer_backend": "mori",
    },
    "--disaggregation-enable-kv-checksum": {
        "disaggregation_mode": "prefill",
        "disaggregation_enable_kv_checksum": True,
    },
    "--disaggregation-decode-host-receive-threshold below 1": {
        "disaggregation_mode": "decode",
        "disaggregation_decode_host_receive_threshold": 0.5,
    },
    "--enable-flexkv": {"enable_flexkv": True},
    "--enable-lmcache": {"enable_lmcache": True},
    "--enable-unified-cache-external-linker": {"enable_unified_cache_external_linker": True},
    "--radix-cache-backend": {"radix_cache_backend": "mine"},
    "--enable-pd-role-switch": {"enable_pd_role_switch": True},
    "--enable-two-batch-overlap": {"enable_two_batch_overlap": True},
    "--speculative-use-block-verification": {"speculative_use_block_verification": True},
    "--hicache-host-memory-mode buffer_only": {
        "enable_hierarchical_cache": True,
        "hicache_host_memory_mode": "buffer_only",
    },
    "--enable-memory-saver": {"enable_memory_saver": True},
    "--enable-unified-memory": {"enable_unified_memory": True},
    "--device npu": {"device": "npu"},
    **{f"{DRAFT_BACKEND} {name}": {"speculative_draft_attention_backend": name}
       for name in ("flashinfer", "trtllm_mha", "intel_xpu")},
}  # fmt: skip


@pytest.mark.parametrize("reason", NOT_OURS)
def test_settings_that_go_to_the_built_in_worker(reason: str, resolve: Any) -> None:
    """SGLang takes some of them on an accelerator only: the choice is tested with the setting as it
    would arrive there."""
    given, draft = resolve(server_flags()), str(PAIR.draft)
    settings = resolving_view(given)
    assert unserved(given, settings, draft) is None
    changes = NOT_OURS[reason]
    arrived = Arrived(given, changes), Arrived(settings, changes)
    assert unserved(*arrived, draft) == reason


def test_a_variable_that_goes_to_the_built_in_worker(
    resolve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang then saves recurrent layers' inputs at other rows."""
    given, draft = resolve(server_flags()), str(PAIR.draft)
    for value, reason in (("0", None), ("1", "SGLANG_ENABLE_PP_SPEC")):
        monkeypatch.setenv("SGLANG_ENABLE_PP_SPEC", value)
        assert unserved(given, resolving_view(given), draft) == reason


@pytest.mark.parametrize("name", ["torch", "torch_native", "flash", *ATTENTION])
def test_a_backend_of_ours_or_of_neither_is_no_reason(name: str, resolve: Any) -> None:
    given = resolve(server_flags())
    asked = Arrived(given, {"speculative_draft_attention_backend": name})
    assert unserved(asked, resolving_view(given), str(PAIR.draft)) is None


def test_a_draft_of_the_hub_is_fetched_to_the_download_dir(
    resolve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its config.json goes to the hub's cache, too, where SGLang reads it."""
    import huggingface_hub
    from sglang.srt.arg_groups.overrides import resolving_view
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    from sglang_dflash.serving.start import choose_worker

    fetched = []

    def fetch(name: str, *, allow_patterns: list[str], cache_dir: Any = None, **_: Any) -> str:
        fetched.append((name, "*.safetensors" in allow_patterns, cache_dir))
        return str(PAIR.draft)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    asked = {"speculative_draft_model_path": "z-lab/a-draft", "download_dir": "/models"}
    given = resolve(server_flags())
    settings = Arrived(resolving_view(given), asked)
    monkeypatch.setattr(choose_worker, "resolving_view", lambda _: settings)
    worker = SpeculativeAlgorithm.DFLASH.create_worker(given)
    _, load_draft = worker.args
    assert load_draft.args == (str(PAIR.draft),)
    assert fetched == [("z-lab/a-draft", False, None), ("z-lab/a-draft", True, "/models")]


def test_without_a_draft_the_published_one_serves(
    resolve: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    """Every process of the server then knows it as if it had been given."""
    import huggingface_hub

    fetched = []

    def fetch(name: str, **_: Any) -> str:
        fetched.append(name)
        return str(PAIR.draft)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    # SGLang reads it by its name.
    cache = tmp_path / "models--z-lab--Qwen3.6-27B-DFlash"
    (cache / "refs").mkdir(parents=True)
    (cache / "refs/main").write_text(40 * "0")
    shutil.copytree(PAIR.draft, cache / "snapshots" / (40 * "0"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    target = tmp_path / "Qwen3.6-27B-FP8"
    target.symlink_to(PAIR.target)
    given = resolve(server_flags(target=target, draft=None))
    assert resolving_view(given).speculative_draft_model_path == "z-lab/Qwen3.6-27B-DFlash"
    assert set(fetched) == {"z-lab/Qwen3.6-27B-DFlash"} and serving(given) == "ours"
    assert "z-lab/Qwen3.6-27B-DFlash is published for" in capfd.readouterr().err


BUILTIN = ("--speculative-dflash-worker", "builtin")
SNAPSHOT = ("--speculative-dflash-recurrent-rollback", "snapshot")
# A function that a scheduler process patches once the target is loaded -> pair and flags of servers
# that need it, and of others.
PATCHED_LATE: dict[str, tuple[list[tuple[str, ...]], list[tuple[str, ...]]]] = {
    "disaggregation.utils.setup_state_kv_args": ([("dense",), ("hybrid",)], [("dense", *BUILTIN)]),
    "layers.attention.linear.gdn_backend.GDNAttnBackend.forward_extend": (
        [("hybrid",)], [("dense",), ("hybrid", *SNAPSHOT), ("hybrid", *BUILTIN)],
    ),
    "models.dflash.DFlashDraftModel.load_weights": (
        [("dense", *BUILTIN), ("dense", "--quantization", "fp8")], [("dense",)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("function", PATCHED_LATE)
def test_a_patch_that_cannot_be_applied_is_refused_before_weights_are_loaded(
    function: str, resolve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    needing, others = PATCHED_LATE[function]

    def started(kind: str, *more: str) -> Any:
        pair = demo_pair(kind)
        return resolve(server_flags(*more, target=pair.target, draft=pair.draft))

    assert all(started(*server) for server in needing)
    monkeypatch.setattr(f"sglang.srt.{function}", lambda *_: None)
    for server in needing:
        with pytest.raises(PatchError, match=f"{function} .*already changed by tests"):
            started(*server)
    assert all(started(*server) for server in others)


def test_our_flags_are_in_the_help(parser: argparse.ArgumentParser) -> None:
    ours = [f"--{name.replace('_', '-')}" for name in (*flags.NAMES, *flags.ALIASES)]
    text = parser.format_help()
    assert not [flag for flag in ours if flag not in text]
    # Their texts are written for the docs, too.
    own = text.partition("\nsglang-dflash:\n")[2]
    assert "CPU" in own and not {"](", "`"} & set(re.findall(r"\]\(|`", own))
