"""Python files in a draft's folder do not run."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from sglang.srt.arg_groups.overrides import resolving_view
from sglang.srt.utils import hf_transformers_utils
from transformers import AutoConfig

from sglang_dflash.common.errors import ConfigError
from sglang_dflash.tools.demo_pairs.pairs import demo_pair
from tests.broken_drafts import server_flags
from tests.errors import refused
from tests.patches.originals import original

PAIR = demo_pair("dense")
TRUST = "--trust-remote-code"
BUILTIN = ["--speculative-dflash-worker", "builtin"]
CONFIG = {"AutoConfig": "trace.TracingConfig"}
MODEL = {"AutoModel": "trace.TracingModel"}
COMMIT = 40 * "0"
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

    def publish(self, cache: Path, name: str = "someone/draft") -> str:
        """Put it into a cache of the hub's files, as a download would, and return that name."""
        repository = cache / f"models--{name.replace('/', '--')}"
        (repository / "refs").mkdir(parents=True)
        (repository / "refs/main").write_text(COMMIT)
        self.folder = shutil.copytree(self.folder, repository / "snapshots" / COMMIT)
        return name


@pytest.fixture
def draft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TracedDraft:
    # Transformers copies code here before it runs it.
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "hf"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return TracedDraft(tmp_path)


# What names a draft in a folder, and one in the hub's cache.
OF_FOLDER: dict[str, Callable[[Path], str]] = {
    "folder": str,
    "slash": lambda folder: f"{folder}/",
    "dots": lambda folder: f"{folder.parent}/./hub/../{folder.name}",
    "relative": lambda folder: os.path.relpath(folder),
    "link": lambda folder: str(link(folder)),
}
OF_HUB: dict[str, Callable[[Path], str]] = {
    "name": lambda folder: folder.parents[1].name.removeprefix("models--").replace("--", "/"),
    **{f"snapshot: {how}": spelled for how, spelled in OF_FOLDER.items() if how != "dots"},
}


def link(folder: Path) -> Path:
    path = folder.with_name("link")
    if not path.exists():
        path.symlink_to(folder)
    return path


@pytest.mark.parametrize(
    ("spellings", "given"),
    [
        pytest.param(spellings, given, id=f"{where}, {given}")
        for where, spellings in {"local": OF_FOLDER, "hub": OF_HUB}.items()
        for given in spellings
    ],
)
def test_a_draft_is_distrusted_by_every_name_of_it(
    spellings: dict[str, Callable[[Path], str]],
    given: str,
    draft: TracedDraft,
    tmp_path: Path,
    resolve: Callable[[list[str]], Any],
) -> None:
    """Its code comes after the checks, which refuse it."""
    if spellings is OF_HUB:
        draft.publish(tmp_path / "hub", f"someone/{tmp_path.name}")
    else:
        (tmp_path / "hub").mkdir()
    names = {how: spelled(draft.folder) for how, spelled in spellings.items()}
    resolve(server_flags(TRUST, draft=names[given]))
    draft.edit(auto_map=CONFIG)
    for name in names.values():
        # SGLang keeps what it has read, by all arguments.
        read = hf_transformers_utils.get_config(
            name, trust_remote_code=True, model_override_args={"read": "anew"}
        )
        assert read.read == "anew" and read.auto_map == CONFIG
    assert not draft.mark.exists()


def test_the_targets_code_runs(
    draft: TracedDraft, tmp_path: Path, resolve: Callable[[list[str]], Any]
) -> None:
    """--trust-remote-code allows it, whatever the draft is and wherever it lies."""
    target = Path(shutil.copytree(PAIR.target, tmp_path / "target"))
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, "auto_map": CONFIG}))
    shutil.move(draft.folder / "trace.py", target)
    shutil.move(draft.folder, target / "draft")
    resolve(server_flags(TRUST, target=target, draft=target / "draft"))
    assert draft.mark.read_text() == "it ran"


def test_trust_is_not_for_the_draft(
    draft: TracedDraft, tmp_path: Path, resolve: Callable[[list[str]], Any]
) -> None:
    """A revision of the target's repository, and a tokenizer of the draft's."""
    name = draft.publish(tmp_path / "hub")
    cases = {
        "--speculative-draft-model-path": server_flags(TRUST, target=name, draft=name),
        "--tokenizer-path": server_flags(TRUST, "--tokenizer-path", str(draft.folder), draft=name),
    }
    for field, flags in cases.items():
        with refused(field):
            resolve(flags)
    resolve(server_flags("--tokenizer-path", str(draft.folder), draft=name))


REFUSED: dict[str, dict[str, Any]] = {
    "model": {"auto_map": MODEL, "architectures": ["TracingModel"]},
    "names that are none": {"auto_map": MODEL, "architectures": [{}, None]},
    "in a config of the config": {
        "llm_config": {"auto_map": MODEL},
        "architectures": ["TracingModel"],
    },
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_draft_whose_code_would_run_is_refused(
    what: str, draft: TracedDraft, resolve: Callable[[list[str]], Any]
) -> None:
    draft.edit(**REFUSED[what])
    names = str(REFUSED[what]["architectures"])
    with refused("auto_map", MODEL, reason=f"SGLang has no class for {names}"):
        resolve(draft.command(*BUILTIN))
    assert not draft.mark.exists()


@pytest.mark.parametrize("worker", [[], BUILTIN], ids=["ours", "builtin"])
@pytest.mark.parametrize("is_on_hub", [False, True], ids=["folder", "hub name"])
@pytest.mark.parametrize("name", ["AutoConfig", "AutoTokenizer", "AutoProcessor"])
def test_other_code_is_refused(
    name: str,
    is_on_hub: bool,
    worker: list[str],
    draft: TracedDraft,
    tmp_path: Path,
    resolve: Callable[[list[str]], Any],
) -> None:
    code = {name: "trace.TracingConfig"}
    draft.edit(auto_map={**MODEL, **code})
    given = draft.publish(tmp_path / "hub") if is_on_hub else draft.folder
    with refused(f"auto_map.{name} in the draft's config.json", code[name]):
        resolve(server_flags(TRUST, *worker, draft=given))
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
    "model": lambda draft: draft.edit(auto_map=MODEL),
    "params.json": mistral,
    "head.pt": adapter,
}


@pytest.mark.parametrize("worker", [[], BUILTIN], ids=["ours", "builtin"])
@pytest.mark.parametrize("is_on_hub", [False, True], ids=["folder", "hub name"])
@pytest.mark.parametrize("route", ROUTES)
def test_no_code_runs_though_that_of_the_target_is_trusted(
    route: str,
    is_on_hub: bool,
    worker: list[str],
    draft: TracedDraft,
    tmp_path: Path,
    resolve: Callable[[list[str]], Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Published drafts name an AutoModel, and their commands trust the target's code. Whatever
    reads a config of the draft's, it does so without trust."""
    ROUTES[route](draft)
    given = str(draft.folder)
    if is_on_hub:
        given = draft.publish(tmp_path / "hub", f"{tmp_path.name}/{draft.folder.name}")
    read, trusted = AutoConfig.from_pretrained, []

    def recording(path: Any, *args: Any, **named: Any) -> Any:
        if str(path) != str(PAIR.target):
            trusted.append(named.get("trust_remote_code", False))
        return read(path, *args, **named)

    monkeypatch.setattr(AutoConfig, "from_pretrained", recording)
    if route == "head.pt":
        with pytest.raises(ConfigError, match=r"head\.pt and adapter_config\.json|model_type"):
            resolve(server_flags(TRUST, *worker, draft=given))
    else:
        settings = resolving_view(resolve(server_flags(TRUST, *worker, draft=given)))
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
    ({"config": lambda draft: draft.edit(auto_map=CONFIG)} | ROUTES)[route](draft)
    with contextlib.suppress(ValueError, AttributeError, TypeError, KeyError):
        original("sglang.srt.utils.hf_transformers.config.get_config")(
            str(draft.folder), trust_remote_code=True
        )
    assert draft.mark.read_text() == "it ran"
