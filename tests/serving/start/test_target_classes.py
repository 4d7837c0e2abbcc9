"""Targets whose class in SGLang gives a DFLASH worker no hidden states are refused at start."""

from __future__ import annotations

import json
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
