"""Python files in a draft's folder do not run."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang.srt.arg_groups.overrides import resolving_view
from transformers import AutoConfig

from sglang_dflash.facts.embedded import demo_pair
from sglang_dflash.facts.errors import ConfigError
from tests.broken_drafts import server_flags
from tests.seam.originals import original

PAIR = demo_pair("dense")
TRUST = "--trust-remote-code"
BUILTIN = ["--speculative-dflash-worker", "builtin"]
CONFIG = {"AutoConfig": "trace.TracingConfig"}
MODEL = {"AutoModel": "trace.TracingModel"}
CODE = """
from pathlib import Path
Path({mark!r}).write_text("it ran")
from transformers import PreTrainedModel, Qwen3Config
class TracingConfig(Qwen3Config):
    pass
class TracingModel(PreTrainedModel):
    config_class = Qwen3Config
"""


class TracedDraft:
    """A copy of the demo draft with a Python file that leaves a mark when it runs."""

    def __init__(self, tmp_path: Path) -> None:
        self.folder, self.mark = tmp_path / "draft", tmp_path / "mark"
        shutil.copytree(PAIR.draft, self.folder)
        (self.folder / "trace.py").write_text(CODE.format(mark=str(self.mark)))

    def edit(self, **fields: Any) -> None:
        file = self.folder / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))

    def command(self, *more: str) -> list[str]:
        return server_flags(*more, draft=self.folder)


@pytest.fixture
def draft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TracedDraft:
    # Transformers copies code here before it runs it.
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "hf"))
    return TracedDraft(tmp_path)


REFUSED: dict[str, tuple[dict[str, Any], list[str], str]] = {
    "model": (
        {"auto_map": MODEL, "architectures": ["TracingModel"]},
        BUILTIN,
        r"SGLang has no class for \['TracingModel'\]",
    ),
    "names that are none": (
        {"auto_map": MODEL, "architectures": [{}, None]},
        BUILTIN,
        r"SGLang has no class for \[\{\}, None\]",
    ),
    "model of transformers": (
        {"auto_map": MODEL},
        ["--model-impl", "transformers"],
        r"--model-impl transformers would run",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_draft_whose_code_would_run_is_refused(
    what: str, draft: TracedDraft, resolve: Callable[[list[str]], Any]
) -> None:
    fields, flags, message = REFUSED[what]
    draft.edit(**fields)
    with pytest.raises(ConfigError, match=message) as refused:
        resolve(draft.command(*flags))
    assert (refused.value.field, refused.value.value) == ("auto_map", fields["auto_map"])
    assert not draft.mark.exists()


def mistral(draft: TracedDraft) -> None:
    """SGLang reads params.json of a folder of such a name."""
    draft.folder = draft.folder.rename(draft.folder.with_name("mistral-large-3"))
    sizes = {"dim": 192, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "hidden_dim": 64}
    others = {"head_dim": 48, "vocab_size": 99, "norm_eps": 1e-6, "rope_theta": 1e4}
    code = {"auto_map": {"AutoConfig": f"{draft.folder}--{CONFIG['AutoConfig']}"}}
    (draft.folder / "params.json").write_text(json.dumps({**sizes, **others, **code}))


def adapter(draft: TracedDraft) -> None:
    """SGLang reads the base that head.pt names if it cannot read config.json."""
    base = Path(shutil.copytree(draft.folder, draft.folder.with_name("base")))
    (base / "config.json").write_text(json.dumps({"model_type": "x", "auto_map": CONFIG}))
    draft.edit(model_type="x")
    (draft.folder / "adapter_config.json").write_text('{"lora_alpha": 1, "r": 1}')
    torch.save({"base": str(base), "weights_dtype": "fp32"}, draft.folder / "head.pt")


ROUTES: dict[str, Callable[[TracedDraft], None]] = {
    "config": lambda draft: draft.edit(auto_map=CONFIG),
    "model": lambda draft: draft.edit(auto_map=MODEL),
    "params.json": mistral,
    "head.pt": adapter,
}


@pytest.mark.parametrize("worker", [[], BUILTIN], ids=["ours", "builtin"])
@pytest.mark.parametrize("route", ROUTES)
def test_no_code_runs_though_that_of_the_target_is_trusted(
    route: str,
    worker: list[str],
    draft: TracedDraft,
    resolve: Callable[[list[str]], Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Published drafts name an AutoModel, and their commands trust the target's code. Whatever
    reads a config of the draft's, it does so without trust."""
    ROUTES[route](draft)
    read, trusted = AutoConfig.from_pretrained, []

    def recording(path: Any, *args: Any, **named: Any) -> Any:
        if Path(path).parent == draft.folder.parent:
            trusted.append(named.get("trust_remote_code", False))
        return read(path, *args, **named)

    monkeypatch.setattr(AutoConfig, "from_pretrained", recording)
    if route == "head.pt":
        with pytest.raises(ConfigError, match=r"head\.pt and adapter_config\.json|model_type"):
            resolve(draft.command(TRUST, *worker))
    else:
        settings = resolving_view(resolve(draft.command(TRUST, *worker)))
        # Of config.json, whatever the folder's name.
        assert settings.speculative_num_draft_tokens == 8
        assert trusted
    assert not any(trusted) and not draft.mark.exists()


def test_a_tokenizer_of_the_draft_is_not_loaded(
    draft: TracedDraft, resolve: Callable[[list[str]], Any]
) -> None:
    named = {"auto_map": {"AutoTokenizer": ["trace.TracingTokenizer", None]}}
    (draft.folder / "tokenizer_config.json").write_text(json.dumps(named))
    resolve(draft.command(TRUST))
    assert not draft.mark.exists()


@pytest.mark.parametrize("route", ["config", "params.json", "head.pt"])
def test_sglang_runs_the_code_without_the_row(route: str, draft: TracedDraft) -> None:
    """The mark works: SGLang's reader runs the file of the same folder."""
    ROUTES[route](draft)
    with contextlib.suppress(ValueError, AttributeError, TypeError, KeyError):
        original("sglang.srt.utils.hf_transformers.config.get_config")(
            str(draft.folder), trust_remote_code=True
        )
    assert draft.mark.read_text() == "it ran"
