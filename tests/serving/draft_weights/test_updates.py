"""New weights in each of SGLang's ways, without a server: whom they reach, and what is refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.managers import io_struct
from sglang.srt.managers.scheduler_components import weight_updater
from sglang.srt.model_executor.model_runner_components import weight_updater as of_runner
from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket
from torch import Tensor, nn

from sglang_dflash.drafting.model import DraftModel
from sglang_dflash.drafting.weights import load_model, read_tensors, save_model
from sglang_dflash.serving.draft_weights.updates import BUCKET, with_draft
from tests.conftest import random_model, raw_config, rewrite, with_own
from tests.patches.originals import original
from tests.quantized_checkpoints import EXPORTERS

MANAGER = weight_updater.SchedulerWeightUpdaterManager
SGLANGS_CHOICE = original(f"{MANAGER.__module__}.{MANAGER.__qualname__}._select_runners")
Q = "layers.0.self_attn.q_proj.weight"


class Target(nn.Module):
    """A target that keeps the weights it is given; its layers have names of the draft's."""

    def __init__(self) -> None:
        super().__init__()
        self.given: dict[str, Tensor] = {}
        self.fails = False

    def load_weights(self, named: Any) -> None:
        if self.fails:
            raise RuntimeError("the target's")
        self.given |= dict(named)


class Served:
    """A server's processes around updates of weights: a target, and a draft."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.target, self.draft = Target(), load_model(folder, dtype=torch.float32)
        self.versions: list[Any] = []
        self.recorded = 0
        parallel = SimpleNamespace(tp_rank=0, tp_group=SimpleNamespace(cpu_group=None))
        for module in (weight_updater, of_runner):
            monkeypatch.setattr(module, "get_parallel", lambda: parallel)
        off = SimpleNamespace(weight_cache_mode="off")
        monkeypatch.setattr(of_runner, "get_model", lambda: off)
        monkeypatch.setattr(torch.distributed, "barrier", lambda **_: None)
        runner = SimpleNamespace(model=self.target)
        runner.weight_updater = of_runner.WeightUpdater(
            tp_rank=0, device="cpu", gpu_id=0, model_config=None, custom_weight_loaders={},
            get_model=lambda: self.target, update_model_fields=print,
            recapture_cuda_graph=print, get_model_runner=lambda: runner,
        )  # fmt: skip
        self.updater = runner.weight_updater
        worker = SimpleNamespace(
            weight_update_runners=lambda: [("target", runner)],
            deserialize_own_rank=lambda sent: sent,
            model_runner=runner,
        )
        drafter = SimpleNamespace(
            draft_model=self.draft,
            weight_update_runners=list,
            dflash=SimpleNamespace(rollback=None),
            record_again=self.record_again,
        )
        scheduler = SimpleNamespace(
            record_weight_version_change=lambda new_version: self.versions.append(new_version)
        )
        self.manager: Any = MANAGER(
            tp_worker=worker, draft_worker=drafter, memory_saver_adapter=None,
            flush_cache=lambda **_: True, is_fully_idle=lambda **_: True, scheduler=scheduler,
        )  # fmt: skip

    def record_again(self) -> None:
        self.recorded += 1

    def sent(self, named: Any, selector: str = "draft", load_format: Any = None) -> Any:
        """Send tensors by `update_weights_from_tensor` in a session of its own."""
        self.manager.begin_weight_update(io_struct.BeginWeightUpdateReqInput(selector=selector))
        request = SimpleNamespace(
            serialized_named_tensors=named, selector=selector, load_format=load_format,
            flush_cache=True, torch_empty_cache=False, weight_version="2",
        )  # fmt: skip
        answer = self.manager.update_weights_from_tensor(request)
        self.manager.end_weight_update(io_struct.EndWeightUpdateReqInput())
        return answer


def saved(folder: Path) -> dict[str, Tensor]:
    """Two drafts in `old` and `new`. Returns the tensors of the second."""
    torch.manual_seed(0)
    for name in ("old", "new"):
        save_model(random_model(raw_config()), raw_config(), folder / name, torch.float32)
    return read_tensors(folder / "new")


@pytest.fixture
def new(tmp_path: Path) -> dict[str, Tensor]:
    return saved(tmp_path)


@pytest.fixture
def served(new: dict[str, Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Served:
    def chosen(manager: Any, *selector: str) -> Any:
        runners = SGLANGS_CHOICE(manager, *selector)
        found = with_draft(runners, manager, *selector)
        return runners if found is None else found

    monkeypatch.setattr(MANAGER, "_select_runners", chosen)
    return Served(tmp_path / "old", monkeypatch)


def has(model: DraftModel, tensors: dict[str, Tensor]) -> bool:
    """Return whether the model has these weights, by one projection and one norm."""
    q, norm = tensors[Q], tensors["layers.0.self_attn.k_norm.weight"]
    qkv = model.get_submodule("layers.0.qkv_proj").weight
    return torch.equal(qkv[: len(q)], q) and torch.equal(model._k_norms()[0], norm)


def marked(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The draft's beside one of the target's."""
    return {**{f"draft.{name}": one for name, one in tensors.items()}, Q: torch.ones(1)}


def bucket(tensors: dict[str, Tensor]) -> dict[str, Any]:
    made = FlattenedTensorBucket(named_tensors=list(tensors.items()))
    return {"flattened_tensor": made.get_flattened_tensor(), "metadata": made.get_metadata()}


def test_an_update_has_no_draft_without_the_row(
    served: Served, new: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MANAGER, "_select_runners", SGLANGS_CHOICE)
    assert served.sent(list(new.items())).success
    assert not has(served.draft, new) and not served.target.given


def test_tensors_for_the_draft(served: Served, new: dict[str, Tensor]) -> None:
    """They come with and without the prefix that some exports have, and in a bucket."""
    old = {name: torch.zeros_like(one) for name, one in new.items()}
    ways = (
        (list(new.items()), None),
        ([(f"model.{name}", one) for name, one in new.items()], None),
        (bucket(new), BUCKET),
    )
    for sent, load_format in ways:
        assert served.sent(list(old.items())).success
        assert not has(served.draft, new)
        answer = served.sent(sent, load_format=load_format)
        assert answer.success and f"{len(new)} tensors" in answer.message
        assert has(served.draft, new) and not served.target.given


@pytest.mark.parametrize("form", ["list", "bucket"])
def test_tensors_for_both(form: str, served: Served, new: dict[str, Tensor]) -> None:
    both = marked(new)
    sent, how = (bucket(both), BUCKET) if form == "bucket" else (list(both.items()), None)
    assert served.sent(sent, "all", how).success
    assert has(served.draft, new) and list(served.target.given) == [Q]


def test_a_targets_update_is_not_the_drafts(served: Served, new: dict[str, Tensor]) -> None:
    """A trainer of the target names no selector, and its layers may have names of the draft's."""
    for selector in ("all", "target"):
        served.target.given.clear()
        assert served.sent(list(new.items()), selector).success
        assert served.target.given.keys() == new.keys()
    assert not has(served.draft, new)


WRONG: dict[str, Any] = {
    "fc.weightt": (torch.zeros(1), "'fc.weightt'; no draft of this config has this tensor"),
    Q: (torch.zeros(1, 2), f"tensor {Q} of the draft: [1, 2]; the config asks for [64, 32]"),
    "norm.weight": (torch.ones(32, dtype=torch.int8), "norm.weight of the draft: 'I8'"),
}


@pytest.mark.parametrize("name", WRONG)
def test_nothing_is_loaded_if_a_tensor_is_wrong(
    name: str, served: Served, new: dict[str, Tensor]
) -> None:
    tensor, message = WRONG[name]
    wrong = {**new, name: tensor}
    for sent, selector in ((wrong, "draft"), (marked(wrong), "all")):
        answer = served.sent(list(sent.items()), selector)
        assert not answer.success and message in answer.message and "unchanged" in answer.message
        assert not has(served.draft, new) and not served.target.given
    assert served.sent(list(new.items())).success


def test_what_is_no_tensor_is_refused(served: Served, new: dict[str, Tensor]) -> None:
    for sent in ([(Q, 5)], [Q], 5, [*new.items(), (Q, new[Q])]):
        answer = served.sent(sent)
        assert not answer.success and "unchanged" in answer.message
    assert not served.sent(list(new.items()), load_format="direct").success
    asked = io_struct.CheckWeightsReqInput(action="checksum", selector="draft")
    assert not served.manager.check_weights(asked).success
    assert not has(served.draft, new)


def test_a_draft_waits_for_its_target(served: Served, new: dict[str, Tensor]) -> None:
    served.target.fails = True
    with pytest.raises(RuntimeError, match="the target's"):
        served.sent(list(marked(new).items()), "all")
    assert not has(served.draft, new)


def test_broadcast_tensors(
    served: Served, new: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    received: list[tuple[str, Tensor]] = []
    receive = "receive_weights_from_distributed"
    monkeypatch.setattr(of_runner.WeightUpdater, receive, lambda *_, **__: received)
    for selector, tensors in (("draft", new), ("all", marked(new))):
        received[:] = tensors.items()
        assert served.sent([(n, t * 0) for n, t in new.items()]).success
        served.manager.begin_weight_update(io_struct.BeginWeightUpdateReqInput(selector=selector))
        request = io_struct.UpdateWeightsFromDistributedReqInput(
            names=[], dtypes=[], shapes=[], selector=selector
        )
        answer = served.manager.update_weights_from_distributed(request)
        served.manager.end_weight_update(io_struct.EndWeightUpdateReqInput())
        assert answer.success and has(served.draft, new)
    assert list(served.target.given) == [Q]


def test_a_folder(served: Served, new: dict[str, Tensor], tmp_path: Path) -> None:
    """A draft's goes to the draft alone; one of another config, or not trained, is refused. A key
    that means nothing here makes no other config."""

    def answer() -> Any:
        request = io_struct.UpdateWeightFromDiskReqInput(
            model_path=str(tmp_path / "new"), weight_version="3"
        )
        return served.manager.update_weights_from_disk(request)

    config = tmp_path / "new" / "config.json"
    config.write_text(json.dumps(raw_config(block_size=6)))
    assert "block_size in the draft's config.json: 6; the served draft has 4" in answer().message
    config.write_text(json.dumps(raw_config(**with_own(of_trainer=1))))
    rewrite(tmp_path / "new", lambda tensors: tensors.update({"norm.weight": torch.zeros(32)}))
    assert "norm.weight of the draft: all zeros" in answer().message
    assert not has(served.draft, new) and not served.versions
    rewrite(tmp_path / "new", lambda tensors: tensors.update(new))
    assert answer().success and has(served.draft, new)
    assert served.versions == ["3"] and not served.target.given


@pytest.mark.parametrize("success", [True, False])
@pytest.mark.parametrize("asked", [True, False])
def test_draft_steps_are_recorded_again_with_the_targets(
    asked: bool, success: bool, served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They read its lm_head. Weights of the draft stay where they are."""
    load = "update_weights_from_disk"
    monkeypatch.setattr(of_runner.WeightUpdater, load, lambda *_, **__: (success, ""))
    for folder, recorded in ((tmp_path, asked and success), (tmp_path / "new", 0)):
        request = io_struct.UpdateWeightFromDiskReqInput(
            model_path=str(folder), recapture_cuda_graph=asked
        )
        before = served.recorded
        served.manager.update_weights_from_disk(request)
        assert served.recorded - before == recorded


def test_a_quantized_folder(served: Served, new: dict[str, Tensor], tmp_path: Path) -> None:
    """Its weights are dequantized as at start, whatever the served draft's were."""
    folder, plain = tmp_path / "quantized", tmp_path / "plain"
    EXPORTERS["W4A16"].write(tmp_path / "new", folder, plain)
    request = io_struct.UpdateWeightFromDiskReqInput(model_path=str(folder))
    assert served.manager.update_weights_from_disk(request).success
    assert has(served.draft, read_tensors(plain)) and not has(served.draft, new)


def test_a_checkpoint_engine(
    served: Served, new: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It hands tensors over in parts, once for both."""
    parts: list[dict[str, Tensor]] = []

    def handed_over(_: Any, handle: str, run: Any, post_hook: Any, **__: Any) -> None:
        assert handle == "here"
        for part in parts:
            run(list(part.items()))

    package, module = ModuleType("checkpoint_engine"), ModuleType("checkpoint_engine.worker")
    monkeypatch.setattr(module, "update_weights_from_ipc", handed_over, raising=False)
    monkeypatch.setitem(sys.modules, "checkpoint_engine", package)
    monkeypatch.setitem(sys.modules, "checkpoint_engine.worker", module)
    from sglang.srt.checkpoint_engine import checkpoint_engine_worker as engine

    worker = engine.SGLangCheckpointEngineWorkerExtensionImpl
    monkeypatch.setattr(worker, "get_device_uuid", lambda _: "GPU-0")
    monkeypatch.setattr(worker, "get_device_id", lambda _: 0)
    request = io_struct.UpdateWeightsFromIPCReqInput(zmq_handles={"GPU-0": "here"})

    parts[:] = [marked({Q: new[Q]}), {"draft.fc.weight": torch.zeros(2)}]
    answer = served.manager.update_weights_from_ipc(request)
    assert not answer.success and "fc.weight of the draft: [2]" in answer.message
    every = list(marked(new).items())
    parts[:] = [dict(every[:7]), dict(every[7:])]
    assert served.manager.update_weights_from_ipc(request).success
    assert has(served.draft, new) and list(served.target.given) == [Q]
    assert "load_weights" not in vars(served.target)
