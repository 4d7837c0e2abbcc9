"""A tiny model gets one thread, unless the user has chosen."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from sglang_dflash import cli
from sglang_dflash.transformers_loop import generate as command
from sglang_dflash.transformers_loop.threads import BYTES_PER_THREAD, threads_for


@pytest.fixture(autouse=True)
def _four_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


def inside(mib: int) -> int:
    """Threads for two models that share weights of that size."""
    weight = torch.nn.Parameter(torch.empty(mib << 20, dtype=torch.uint8), requires_grad=False)
    model = torch.nn.Module()
    model.weight = weight
    with threads_for(model, model):
        return torch.get_num_threads()


def test_threads_follow_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    per_thread = BYTES_PER_THREAD >> 20
    assert inside(1) == 1 and inside(2 * per_thread) == 2 and inside(9 * per_thread) == 4
    assert torch.get_num_threads() == 4
    torch.set_num_threads(2)
    assert inside(9 * per_thread) == 2


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "MKL_NUM_THREADS"])
def test_the_users_choice_stands(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "4")
    assert inside(1) == 4


def test_generate_runs_the_embedded_pair_in_one_thread(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = set[int]()
    generate = command.spec_generate

    def watched(*args: object, **kwargs: object) -> object:
        seen.add(torch.get_num_threads())
        return generate(*args, **kwargs)

    monkeypatch.setattr(command, "spec_generate", watched)
    assert cli.main(["generate", "--prompt", "def ", "--max-new-tokens", "4"]) == 0
    assert seen == {1} and torch.get_num_threads() == 4


@pytest.mark.engine
@pytest.mark.parametrize("given", [None, "ACTIVE"])
def test_waiting_threads_sleep_unless_the_user_says_otherwise(given: str | None) -> None:
    code = (
        "import os\nfrom sglang_dflash import cli\n"
        "cli.main(['generate', '--prompt', '', '--device', 'cpu'])\n"
        "assert cli.main(['generate', '--prompt', 'a', '--device', 'abacus']) == 1\n"
        "print(os.environ['OMP_WAIT_POLICY'])"
    )
    env = {k: v for k, v in os.environ.items() if k != "OMP_WAIT_POLICY"}
    if given is not None:
        env["OMP_WAIT_POLICY"] = given
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env=env, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.split() == [given or "PASSIVE"]
