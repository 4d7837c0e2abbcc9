"""Every field of SGLang's requests and batches that a step reads is there: after an upgrade, this
tells which one went."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import ROOT
from tests.serving.batches import batch_of, request_of, sampling_info

FOLDERS = ("step", "kv_transfer", "hybrid")
FILES = sorted(
    path for name in FOLDERS for path in (ROOT / "sglang_dflash/serving" / name).glob("*.py")
)
# Names of variables and fields that hold an object of SGLang's, wherever they stand.
HELD = {
    "batch": batch_of(), "request": request_of(), "req": request_of(), "info": sampling_info(),
    "sampling_info": sampling_info(), "sampling_params": request_of().sampling_params,
}  # fmt: skip


def fields_read(source: str) -> Iterator[tuple[str, str]]:
    """The name of the object and of its field, of every access."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            held = getattr(node.value, "id", getattr(node.value, "attr", None))
            if held in HELD:
                yield str(held), node.attr


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_the_fields_that_are_read_are_sglangs(path: Path) -> None:
    gone = {(held, field) for held, field in fields_read(path.read_text())
            if not hasattr(HELD[held], field)}  # fmt: skip
    assert not gone


def test_a_field_that_went_is_named() -> None:
    read = [
        *fields_read("batch.seq_lens\nother.x\nself.batch.reqs[0].y\nrequest.sampling_params.n")
    ]
    assert {("batch", "seq_lens"), ("batch", "reqs"), ("sampling_params", "n")} <= {*read}
    assert len(read) == 4 and not hasattr(HELD["batch"], "sequence_lengths")
    with pytest.raises(AttributeError, match="seed_of_old"):
        request_of(seed_of_old=3)
    with pytest.raises(TypeError, match="old_field"):
        batch_of(old_field=3)
