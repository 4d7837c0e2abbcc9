"""docs/security.md names every module that reaches the network or starts a process; none runs text
as code; log lines hold nothing of a request or of the environment."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.test_imports import FILES, ROOT, imported, parsed, top_level

PACKAGE = ROOT / "sglang_dflash"
NETWORK = {"requests", "httpx", "socket", "urllib", "huggingface_hub", "aiohttp", "ftplib"}
# `http` itself has status codes only.
HTTP = {"http.client", "http.server"}
# Functions that fetch what is given by name.
FETCHES = {"from_pretrained", "load_dataset"}
LOADERS = {
    "torch.load", "pickle.load", "pickle.loads", "joblib.load", "numpy.load", "np.load",
    "yaml.load", "marshal.loads", "shelve.open", "dill.load",
}  # fmt: skip
RUNNERS = {"eval", "exec", "compile", "__import__", "os.system", "os.popen"}
# What SGLang calls with objects of its own: names of a request's content.
CONTENT = {
    "text", "prompt", "input_ids", "output_ids", "origin_input_ids", "input_text", "messages",
    "tokens", "environ", "getenv",
}  # fmt: skip


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE if PACKAGE in path.parents else ROOT).as_posix()


def calls(path: Path) -> Iterator[tuple[str, ast.Call]]:
    """The calls of a file, with the dotted name of what is called."""
    for node in parsed(path)[1]:
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


def documented(section: str) -> set[str]:
    """The modules in the first column of a section's table."""
    page = (ROOT / "docs/security.md").read_text().split(f"## {section}\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (`[^|]*`) \|", page, re.M)
    return {name for row in rows for name in re.findall(r"`([^`]+)`", row)}


def dangers(path: Path) -> set[str]:
    """Return what in a file unpickles or runs text: packages, functions, keyword arguments."""
    found = top_level(path) & {"pickle", "dill", "joblib", "marshal", "shelve", "cloudpickle"}
    for name, call in calls(path):
        on = {k.arg for k in call.keywords if isinstance(k.value, ast.Constant) and k.value.value}
        found |= {name} & (LOADERS | RUNNERS)
        found |= {f"{name}({k})" for k in on & {"shell", "trust_remote_code", "allow_pickle"}}
    return found


def test_nothing_unpickles_or_runs_text() -> None:
    assert not {name_of(path): dangers(path) for path in FILES if dangers(path)}


def ours(path: Path) -> set[str]:
    """Names that a file takes from this package. They fetch in the module that defines them."""
    return {"cls"} | {
        alias.asname or alias.name
        for node in parsed(path)[1]
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sglang_dflash")
        for alias in node.names
    }


def reaches_the_network(path: Path) -> bool:
    fetching = {name for name, _ in calls(path) if name.rpartition(".")[2] in FETCHES}
    fetching = {name for name in fetching if name.partition(".")[0] not in ours(path)}
    return bool(top_level(path) & NETWORK or imported(path) & HTTP or fetching)


def test_the_page_names_every_module_that_reaches_the_network() -> None:
    reaching = {name_of(path) for path in FILES if reaches_the_network(path)}
    assert reaching == documented("Network")


def test_the_page_names_every_module_that_starts_a_process() -> None:
    starting = {name_of(path) for path in FILES if top_level(path) & {"subprocess", "pty"}}
    assert starting == documented("Processes")


def logged(path: Path) -> Iterator[ast.Call]:
    """Calls of a logger."""
    for name, call in calls(path):
        if re.fullmatch(r"(\w*logg\w*)\.(debug|info|warning|error|exception|critical)", name):
            yield call


def content_of(call: ast.Call) -> set[str]:
    """Return the names in a call that hold a request's or the environment's content."""
    names = {getattr(part, "attr", getattr(part, "id", "")) for part in ast.walk(call)}
    return names & CONTENT


def test_no_log_line_takes_content_or_the_environment() -> None:
    lines = [(path, call) for path in FILES for call in logged(path)]
    assert lines
    assert not [f"{name_of(p)}:{c.lineno} {content_of(c)}" for p, c in lines if content_of(c)]
