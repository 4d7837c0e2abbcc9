"""Python files in a draft's folder do not run."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sglang_dflash.facts.embedded import demo_pair
from sglang_dflash.facts.errors import ConfigError

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
        return [
            *("--model-path", str(PAIR.target)),
            *("--speculative-algorithm", "DFLASH"),
            *("--speculative-draft-model-path", str(self.folder)),
            *more,
        ]


@pytest.fixture
def draft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TracedDraft:
    # Transformers copies code here before it runs it.
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "hf"))
    return TracedDraft(tmp_path)


REFUSED: dict[str, tuple[dict[str, Any], list[str], str]] = {
    "config": ({"auto_map": CONFIG}, [TRUST], r"--trust-remote-code would run its AutoConfig"),
    "config, built-in": ({"auto_map": CONFIG}, [TRUST, *BUILTIN], r"--trust-remote-code"),
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


@pytest.mark.parametrize("auto_map", [MODEL, CONFIG], ids=["model", "config"])
def test_code_that_does_not_run_is_no_reason_to_refuse(
    auto_map: dict[str, str], draft: TracedDraft, resolve: Callable[[list[str]], Any]
) -> None:
    """Published drafts name an AutoModel, and their commands trust the target's code."""
    draft.edit(auto_map=auto_map)
    resolve(draft.command(*([TRUST] if auto_map == MODEL else [])))
    assert not draft.mark.exists()


def test_a_tokenizer_of_the_draft_is_not_loaded(
    draft: TracedDraft, resolve: Callable[[list[str]], Any]
) -> None:
    named = {"auto_map": {"AutoTokenizer": ["trace.TracingTokenizer", None]}}
    (draft.folder / "tokenizer_config.json").write_text(json.dumps(named))
    resolve(draft.command(TRUST))
    assert not draft.mark.exists()


def test_sglang_runs_the_code_without_the_check(draft: TracedDraft) -> None:
    """The mark works: SGLang's reader runs the file of the same folder."""
    from sglang.srt.utils.hf_transformers_utils import get_config

    draft.edit(auto_map=CONFIG)
    get_config(str(draft.folder), trust_remote_code=True)
    assert draft.mark.read_text() == "it ran"
