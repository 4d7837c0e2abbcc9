"""New weights on a server: for the target from the right folder and another model's; for the draft
in every way that a machine without a GPU has."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests
import torch
from sglang.srt.utils import MultiprocessingSerializer, init_custom_process_group
from torch import Tensor

from sglang_dflash.checkpoint.draft_config import DraftConfig
from sglang_dflash.drafting.weights import draft_tensors
from sglang_dflash.tools.bench.server import Server, free_port
from tests.conftest import rewrite
from tests.engine import client, workload
from tests.engine.servers import (
    DFLASH,
    GRAPHS,
    PAIR,
    TP2_DISAGREEING,
    WITHOUT_REPAIRS,
    ServerConfig,
)
from tests.engine.session import ServerSession

OFF = DFLASH.named("unrepaired").with_env(**WITHOUT_REPAIRS)


def update(server: Server, folder: str, **more: str) -> requests.Response:
    """Update an idle server: SGLang reports failure if its cache cannot be emptied afterwards."""
    client.flush(server)
    return requests.post(
        f"{server.url}/update_weights_from_disk", json={"model_path": folder, **more}, timeout=120
    )


def output(server: Server) -> list[int]:
    return client.ask(server, workload.prompts()["demo"][0])["output_ids"]


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """Weights of another architecture, with names of the target's tensors."""
    folder = tmp_path / "other"
    shutil.copytree(PAIR.draft, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["Other"]}))
    return folder


def test_outputs_are_wrong_without_the_row(servers: ServerSession, other: Path) -> None:
    """Without the repairs. The last update ruins the weights, so the server is the test's own."""
    with servers.own(OFF) as server:
        before = output(server)
        assert update(server, str(PAIR.target)).json()["success"]
        assert output(server) == before
        assert update(server, str(other)).json()["success"]
        assert output(server) != before


@pytest.mark.server(DFLASH)
def test_another_models_weights_are_refused(server: Server, other: Path) -> None:
    """The weights stay, and at the end the same ones are loaded once more."""
    before = output(server)
    answer = update(server, str(other))
    assert answer.status_code == 400 and not answer.json()["success"]
    message = answer.json()["message"]
    assert "Other" in message and "Qwen3" in message and "unchanged" in message
    for name in (5000 * "a", "dra\0ft", "/no/such/folder"):
        answer = update(server, name)
        assert answer.status_code == 400 and not answer.json()["success"], name[:20]
    for load_format in ("nonesuch", "npcache", "pt"):
        answer = update(server, str(PAIR.target), load_format=load_format)
        assert answer.status_code == 400 and load_format in answer.json()["message"]
    client.flush(server)
    assert output(server) == before
    assert update(server, str(PAIR.target)).json()["success"]
    assert output(server) == before


# -- the draft's

Send = Callable[[Server, dict[str, Tensor], str], requests.Response]


def session(server: Server, selector: str, name: str, **body: Any) -> requests.Response:
    """An update of that kind, in a session of its own."""
    client.post(server, "begin_weight_update", {"selector": selector})
    body = {"selector": selector, **body}
    answer = requests.post(f"{server.url}/{name}", json=body, timeout=120)
    client.post(server, "end_weight_update", {})
    return answer


def by_tensor(server: Server, tensors: dict[str, Tensor], selector: str) -> requests.Response:
    ranks = int(str(server.config.flags.get("--tp-size", 1)))
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    try:
        # Each rank opens tensors of its own.
        sent = [
            MultiprocessingSerializer.serialize(
                [(name, tensor.clone()) for name, tensor in tensors.items()], output_str=True
            )
            for _ in range(ranks)
        ]
        return session(
            server, selector, "update_weights_from_tensor", serialized_named_tensors=sent
        )
    finally:
        torch.multiprocessing.set_sharing_strategy(before)


def broadcast(server: Server, tensors: dict[str, Tensor], selector: str) -> requests.Response:
    """Send tensors from the first rank of a group that the server joins."""
    port, group = free_port(), f"group-{time.monotonic_ns()}"
    joins = {
        "master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2,
        "group_name": group, "backend": "gloo",
    }  # fmt: skip
    with ThreadPoolExecutor(1) as pool:
        joined = pool.submit(client.post, server, "init_weights_update_group", joins)
        ours = init_custom_process_group(
            backend="gloo", init_method=f"tcp://127.0.0.1:{port}", world_size=2, rank=0,
            group_name=group,
        )  # fmt: skip
        joined.result()
        described = {
            "names": list(tensors),
            "dtypes": [str(t.dtype).removeprefix("torch.") for t in tensors.values()],
            "shapes": [list(t.shape) for t in tensors.values()],
            "group_name": group,
        }
        name = "update_weights_from_distributed"
        answer = pool.submit(session, server, selector, name, **described)
        for tensor in tensors.values():
            torch.distributed.broadcast(tensor.contiguous(), src=0, group=ours)
        told = answer.result()
        client.post(server, "destroy_weights_update_group", {"group_name": group})
    torch.distributed.destroy_process_group(ours)
    return told


def drafted(server: Server) -> tuple[list[int], int]:
    """An answer, and how many tokens of the draft it has (not of lookup). Which of the two sources
    is verified, a server learns from what it served before; so the number varies a little where
    text is looked up."""
    client.flush(server)
    before = accepted_of_the_draft(server)
    answer = client.ask(server, workload.prompts()["demo"][0], max_new_tokens=48)
    return answer["output_ids"], accepted_of_the_draft(server) - before


def assert_drafts_as_before(server: Server, answer: list[int], accepted: int) -> None:
    same, again = drafted(server)
    assert same == answer and 0.75 * accepted < again < 1.5 * accepted


def accepted_of_the_draft(server: Server) -> int:
    report = server.dflash()
    by_source = report.get("accepted_drafts_by_source")
    return sum(report["accepted_drafts"]) if by_source is None else by_source["draft"]


# One whose steps are recorded, one, and two ranks.
WAYS = [
    (GRAPHS, by_tensor, "draft"),
    (DFLASH, broadcast, "all"),
    (TP2_DISAGREEING, by_tensor, "all"),
]


@pytest.mark.parametrize(
    ("config", "send", "selector"), WAYS, ids=lambda value: getattr(value, "__name__", str(value))
)
def test_new_weights_of_a_draft(
    config: ServerConfig, send: Send, selector: str, server: Server
) -> None:
    """With zeros no draft is accepted, and the old weights bring them back; the target's outputs
    are the same throughout. What is wrong is named, and changes nothing."""
    before, accepted = drafted(server)
    assert accepted > 20
    folder = str(server.config.flags["--speculative-draft-model-path"])
    # Updates are of plain weights, also those of a quantized draft.
    weights = draft_tensors(DraftConfig.from_pretrained(folder), folder, torch.float32)
    mark = "draft." if selector == "all" else ""

    def sent(tensors: dict[str, Tensor]) -> requests.Response:
        return send(server, {mark + name: t for name, t in tensors.items()}, selector)

    for wrong in ({"fc.weight": torch.zeros(2, 3)}, {"fc.weights": torch.zeros(2)}):
        answer = sent({"norm.weight": torch.zeros(weights["norm.weight"].shape), **wrong})
        assert answer.status_code == 400 and min(wrong) in answer.json()["message"]
        assert_drafts_as_before(server, before, accepted)
    assert sent({name: torch.zeros_like(t) for name, t in weights.items()}).ok
    assert drafted(server) == (before, 0)
    assert sent(weights).ok
    assert_drafts_as_before(server, before, accepted)


@pytest.mark.server(DFLASH)
def test_a_folder_of_a_draft(server: Server, tmp_path: Path) -> None:
    """By then it is the folder of another draft of the same config, whose norm is negative."""
    before, accepted = drafted(server)
    shutil.copytree(PAIR.draft, tmp_path, dirs_exist_ok=True)
    rewrite(tmp_path, lambda tensors: tensors["norm.weight"].neg_())
    assert update(server, str(tmp_path)).ok
    output_then, accepted_then = drafted(server)
    assert output_then == before and accepted_then < accepted / 4
    assert update(server, str(PAIR.draft)).ok
    assert_drafts_as_before(server, before, accepted)
    # The target's, as before.
    assert update(server, str(PAIR.target)).ok
    assert_drafts_as_before(server, before, accepted)
