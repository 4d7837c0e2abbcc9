"""Fields shown to operators, and calls open to them, without a server."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fastapi import HTTPException
from sglang.srt.eplb.expert_distribution import get_global_expert_distribution_recorder
from sglang.srt.managers.io_struct import ProfileReq, ProfileReqType
from sglang.srt.managers.scheduler_components import profiler_manager
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.sampling.watermarking import core
from sglang.srt.utils.request_logger import RequestLogger

from sglang_dflash.plugins.repairs import bad_bodies, profiles, secrets
from tests.patches.originals import original

ARGUMENTS = {"model_path": "m", "api_key": "k1", "internal_states": [{"admin_api_key": "k2"}]}


def shown() -> str:
    return str(core.redact_watermark_secrets(ARGUMENTS))


def test_keys_are_shown_without_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    own = secrets.FIELDS - {"api_key", "admin_api_key"}
    monkeypatch.setattr(core, "WATERMARK_SECRET_FIELD_NAMES", own)
    assert "k1" in shown() and "k2" in shown()
    monkeypatch.setattr(core, "WATERMARK_SECRET_FIELD_NAMES", secrets.FIELDS)
    assert "k1" not in shown() and "k2" not in shown() and "'m'" in shown()


def test_keys_of_the_command_line_are_hidden() -> None:
    """They are hidden in all forms that argparse takes."""
    theirs = original("sglang.srt.sampling.watermarking.core.redact_watermark_command_line")
    line = [
        "launch", "--api-key", "k1", "--admin-api-key=k2", "--ssl-keyfile-p", "k3", "--admin-a=k4",
        "--ap", "k5", "--api-key", "--k6", "--watermark-config", "k7", "--model-path", "m",
    ]  # fmt: skip
    assert "k1" in theirs(line, None) and "k2" in theirs(line, None)
    shown = secrets.hide_in_command(theirs, line, None)
    assert not any(f"k{i}" in shown for i in range(1, 8)) and shown.endswith("--model-path m")


def manager(mode: Any, resolved: Any = None) -> Any:
    given = SimpleNamespace(expert_distribution_recorder_mode=mode)
    if resolved is not None:
        given._resolved_overrides = [("eplb", {"expert_distribution_recorder_mode": resolved})]
    return SimpleNamespace(server_args=given)


def test_the_recorder_raises_without_the_rows() -> None:
    with pytest.raises(Exception, match=r"recorder"):
        get_global_expert_distribution_recorder().dump_record()
    with pytest.raises(HTTPException) as refused:
        bad_bodies.refuse_without_recorder(manager(None))
    assert refused.value.status_code == 400
    bad_bodies.refuse_without_recorder(manager("stat"))
    # --enable-eplb has one, too.
    bad_bodies.refuse_without_recorder(manager(None, resolved="stat"))


def test_memory_that_was_not_released_without_the_rows() -> None:
    """The first would end the scheduler; the second is refused before it asks the scheduler."""
    updater = SimpleNamespace(offload_tags=set())
    asked = SimpleNamespace(tags=["kv_cache"])
    resume = original(
        "sglang.srt.managers.scheduler_components.weight_updater"
        ".SchedulerWeightUpdaterManager.resume_memory_occupation"
    )
    with pytest.raises(KeyError):
        resume(updater, asked)
    for saver in (False, True):
        manager = SimpleNamespace(server_args=SimpleNamespace(enable_memory_saver=saver))
        with nullcontext() if saver else pytest.raises(HTTPException, match="memory-saver"):
            bad_bodies.refuse_without_memory_saver(manager, asked)


def test_a_level_without_the_row() -> None:
    own = RequestLogger(
        log_requests=False, log_requests_level=0, log_requests_format="text", log_requests_target=[]
    )
    with pytest.raises(ValueError, match="Invalid --log-requests-level"):
        own.configure(log_requests=True, log_requests_level=9)
    assert own.log_requests_level == 9  # It stays, and every request would fail.
    for level in bad_bodies.LOG_LEVELS:
        own.configure(log_requests=True, log_requests_level=level)
        bad_bodies.check_logging(None, SimpleNamespace(log_requests_level=level))
    bad_bodies.check_logging(None, SimpleNamespace(log_requests_level=None))
    with pytest.raises(HTTPException, match="log_requests_level: 9"):
        bad_bodies.check_logging(None, SimpleNamespace(log_requests_level=9))


MANAGER = "sglang.srt.managers.scheduler_components.profiler_manager.SchedulerProfilerManager"
NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU can be profiled")


@pytest.fixture
def profiler(monkeypatch: pytest.MonkeyPatch) -> Any:
    """SGLang's, in a process of one rank."""
    monkeypatch.setattr(
        profiler_manager, "get_dp_tp_group", lambda: SimpleNamespace(cpu_group=None)
    )
    return profiler_manager.SchedulerProfilerManager(get_forward_ct=lambda: 0)


@NO_GPU
@pytest.mark.parametrize("activity", ["GPU", "MEM", "RPD"])
@pytest.mark.parametrize("by_stage", [False, True], ids=["at-once", "in-a-step"])
def test_a_profile_that_cannot_be_made_is_an_answer(
    activity: str, by_stage: bool, profiler: Any, tmp_path: Path
) -> None:
    asked = ProfileReq(
        req_type=ProfileReqType.START_PROFILE, output_dir=str(tmp_path), num_steps=1,
        activities=["CPU", activity] if activity != "GPU" else [activity], profile_id="x",
        profile_by_stage=by_stage,
    )  # fmt: skip
    batch = SimpleNamespace(forward_mode=ForwardMode.EXTEND)
    request, step = original(f"{MANAGER}._profile"), original(f"{MANAGER}._profile_batch_predicate")
    if by_stage:
        assert request(profiler, asked).success
        with pytest.raises(Exception):  # noqa: B017  # Of many types.
            step(profiler, batch)
        profiles.log_failure(step, profiler, batch)
    else:
        with pytest.raises(Exception):  # noqa: B017
            request(profiler, asked)
        answer = profiles.report_failure(request, profiler, asked)
        assert not answer.success and "no profile can be made" in answer.message
    # Nothing is left that fails in later steps, and another profile can be made.
    step(profiler, batch)
    asked.activities, asked.profile_by_stage, asked.num_steps = ["CPU"], False, None
    assert profiles.report_failure(request, profiler, asked).success
    profiler.torch_profiler.stop()
