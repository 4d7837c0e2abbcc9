"""Targets whose class in SGLang gives a DFLASH worker no hidden states are refused at start."""

from __future__ import annotations

import importlib
import inspect
import json
import re
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.models import minicpmv, qwen4_exp
from sglang.srt.models.registry import ModelRegistry

from sglang_dflash.checkpoint.published import shipped
from sglang_dflash.checkpoint.target_classes import (
    METHOD,
    SILENT,
    TARGETS,
    WITHOUT_LAST_OUTPUT,
    check_last_layer,
    check_target_class,
)
from sglang_dflash.common.errors import ConfigError
from sglang_dflash.serving.start import check_pair
from sglang_dflash.tools import cli
from tests.broken_drafts import PAIR, server_flags
from tests.errors import refused

BUILTIN = ["--speculative-dflash-worker", "builtin"]


def test_the_table_is_sglangs() -> None:
    classes = ModelRegistry.models
    served = {name for name in classes if hasattr(classes[name], METHOD)}
    forwarding = {name for name in classes if issubclass(classes[name], minicpmv.MiniCPMV)}
    assert served - SILENT < TARGETS < served | forwarding
    assert served > SILENT
    # Classes that make an object of another class, by the version in the config.
    made = {version: hasattr(of, METHOD) for version, of in minicpmv._SUPPORT_VERSION.items()}
    assert made == {(2, 6): False, (4, 0): False, (4, 5): False, (4, 6): True, (4, 7): True}
    assert forwarding - TARGETS == {"MiniCPMV"}


def test_published_targets_are_in_it() -> None:
    named = [facts for facts in shipped("target").values() if "architectures" in facts.config]
    assert len(named) > 3
    for facts in named:
        check_target_class(facts.name, facts.config["architectures"])


@pytest.fixture
def target(tmp_path: Path) -> Callable[..., str]:
    def make(*architectures: str) -> str:
        folder = Path(shutil.copytree(PAIR.target, tmp_path / "target"))
        raw = json.loads((folder / "config.json").read_text())
        raw["architectures"] = architectures
        (folder / "config.json").write_text(json.dumps(raw))
        return str(folder)

    return make


@pytest.mark.parametrize("worker", [[], BUILTIN], ids=["ours", "builtin"])
@pytest.mark.parametrize(
    "name",
    [
        "Qwen2ForCausalLM", "Gemma3ForCausalLM", "GraniteForCausalLM", "Olmo2ForCausalLM",
        "Glm4MoeForCausalLM", "Mistral3ForConditionalGeneration", "NoneSuchForCausalLM",
    ],
)  # fmt: skip
def test_a_target_that_no_worker_can_serve_is_refused(
    name: str,
    worker: list[str],
    target: Callable[..., str],
    resolve: Callable[[list[str]], Any],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It is refused before its weights are loaded, in one line, and by `inspect`, too."""
    folder = target(name)
    with pytest.raises(ConfigError) as refused:
        resolve(server_flags(*worker, target=folder))
    line = str(refused.value)
    assert line == (
        f"--model-path: {folder!r}; SGLang's class for ['{name}'] has no {METHOD}: no DFLASH "
        "worker, SGLang's included, can serve it with a draft"
    )
    capsys.readouterr()
    assert cli.main(["inspect", folder, str(PAIR.draft), "--offline"]) == 1
    assert capsys.readouterr().err.strip() == line.replace("--model-path", "sglang-dflash: TARGET")


def test_a_target_that_returns_no_hidden_states_is_refused(
    target: Callable[..., str],
    resolve: Callable[[list[str]], Any],
    capsys: pytest.CaptureFixture[str],
) -> None:
    (name,) = SILENT
    folder, reason = target(name), f"SGLang's class for ['{name}'] returns no hidden states"
    with refused("--model-path", folder, reason=reason):
        resolve(server_flags(target=folder))
    assert cli.main(["inspect", folder, str(PAIR.draft), "--offline"]) == 1
    assert reason in capsys.readouterr().err


class CapturedLayer:
    """A layer of the model that is silent, whose output a draft is to read."""

    ple, _is_layer_to_capture = None, True

    def hc_norms(self, *_: Any) -> Any:
        return nullcontext(SimpleNamespace(output=None))

    def __call__(self, *, hidden_states: Any, captured_last_layer_outputs: Any, **_: Any) -> Any:
        captured_last_layer_outputs.capture(hidden_states)
        return hidden_states


def test_it_drops_the_hidden_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's own forward, over stubs. The class around it expects them beside the output."""
    rank = SimpleNamespace(is_first_rank=True, is_last_rank=True)
    model: Any = qwen4_exp.Qwen4ExpVLModel.__new__(qwen4_exp.Qwen4ExpVLModel)
    torch.nn.Module.__init__(model)
    layer = CapturedLayer()
    vars(model).update(
        pp_group=rank, has_ple=False, _start_layer=0, _end_layer=1, layers=[layer],
        hyper_connection_mixer=SimpleNamespace(hc_norm=None),
    )  # fmt: skip
    monkeypatch.setattr(qwen4_exp.residual_batch, "start", lambda _: None)
    monkeypatch.setattr(qwen4_exp.residual_batch, "final_norm", lambda hidden, *_: hidden)
    monkeypatch.setattr(qwen4_exp, "_shards_rows_over_cp", lambda _: False)
    batch = SimpleNamespace(forward_mode=SimpleNamespace(is_idle=lambda: False))
    ids, embedded = torch.arange(8), torch.ones(8, 4)
    out = model.forward(ids, ids, batch, input_embeds=embedded)
    assert out.shape == embedded.shape  # Not a pair.


# SGLang's modules of the models in `WITHOUT_LAST_OUTPUT`, and some that give the last output.
WITHOUT = (
    "deepseek_v2 glm4_moe_lite llama qwen2_moe qwen3 qwen3_5 qwen3_moe qwen3_next qwen3_vl "
    "qwen3_vl_moe"
)
WITH = "gpt_oss laguna lfm2 nemotron_h"


def captured(module: str) -> set[str]:
    """Return what SGLang's model looks up among the layers to capture: layer i stands for the
    output of the one before."""
    source = importlib.import_module(f"sglang.srt.models.{module}")
    return set(re.findall(r"(\S+) in self\.layers_to_capture", inspect.getsource(source)))


def test_some_classes_capture_what_their_layers_read_only() -> None:
    for module in WITHOUT.split():
        assert captured(module) <= {"i", "layer_idx", "layer_id"}, module
    for module in WITH.split():
        assert captured(module) & {"self.end_layer", "len(self.layers)"}, module
    assert WITHOUT_LAST_OUTPUT < TARGETS


@pytest.mark.parametrize(("last", "fits"), [(1, False), (2, True)])
def test_a_draft_that_reads_the_last_layer_is_refused(
    last: int,
    fits: bool,
    resolve: Callable[[list[str]], Any],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    draft, raw = tmp_path / "draft", json.loads((PAIR.draft / "config.json").read_text())
    ids = raw["dflash_config"]["target_layer_ids"]
    ids[-1] = raw["num_target_layers"] - last
    shutil.copytree(PAIR.draft, draft)
    (draft / "config.json").write_text(json.dumps(raw))
    reason = f"ids below {raw['num_target_layers'] - 1} are required"
    field = "target_layer_ids in the draft's config.json"
    with nullcontext() if fits else refused(field, ids, reason=reason):
        resolve(server_flags(draft=draft))
    capsys.readouterr()
    code = cli.main(["inspect", str(PAIR.target), str(draft), "--offline"])
    assert (code == 0) == fits and (reason in capsys.readouterr().err) != fits


@pytest.mark.parametrize("names", [["GptOssForCausalLM"], ["OfAPlugin"], None])
def test_other_classes_may_give_the_last_output(names: list[str] | None) -> None:
    check_last_layer([1, 5], 6, names)
    check_last_layer([1, 4], 6, ["Qwen3ForCausalLM"])


def test_transformers_classes_are_refused(resolve: Callable[[list[str]], Any]) -> None:
    with refused("--model-impl", "transformers", reason=METHOD):
        resolve(server_flags("--model-impl", "transformers"))


@pytest.mark.parametrize("names", [["Qwen3ForCausalLM"], ["NoneSuch", "Qwen3ForCausalLM"]])
def test_a_class_of_a_plugin_is_judged_by_the_registry(
    names: list[str],
    target: Callable[..., str],
    resolve: Callable[[list[str]], Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(check_pair, "TARGETS", frozenset())
    resolve(server_flags(target=target(*names)))
