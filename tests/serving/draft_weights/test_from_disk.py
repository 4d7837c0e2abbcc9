"""Updates of the draft's weights, and the served model's name after them."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.tokenizer_manager import TokenizerManager

from sglang_dflash.serving.draft_weights.from_disk import is_for_draft, keep_served_model
from sglang_dflash.tools.demo_pairs.pairs import demo_pair
from tests.patches.originals import original

PAIR = demo_pair("dense")
OURS: dict[str, Any] = {"dflash": {}}
SERVED = ("m", str(PAIR.target))
WAIT = "sglang.srt.managers.tokenizer_manager.TokenizerManager._wait_for_model_update_from_disk"


class Manager(SimpleNamespace):
    """SGLang's, of a server with these states; `answer` is what its schedulers say."""

    _update_model_path_info = TokenizerManager._update_model_path_info

    def __init__(self, *states: Any, draft: Any = PAIR.draft, answer: bool = True) -> None:
        given = SimpleNamespace(speculative_draft_model_path=draft and str(draft))
        name, folder = SERVED
        super().__init__(
            server_args=given, states=states, elastic_worker_count=1, answer=answer,
            served_model_name=name, model_path=folder, record_config_updates=lambda *_, **__: None,
        )  # fmt: skip

    async def get_internal_state(self) -> Any:
        return self.states

    def _dispatch_to_scheduler(self, _obj: Any) -> None:
        result = SimpleNamespace(success=self.answer, message="", num_paused_requests=0)
        self.model_update_result.set_result(result)

    @property
    def served(self) -> tuple[str, str]:
        return self.served_model_name, self.model_path


def updated(manager: Manager, folder: Any, ours: bool = True) -> tuple[str, str]:
    """Return the model that the manager serves after an update from that folder."""
    update = SimpleNamespace(model_path=str(folder), load_format="auto")
    wait = original(WAIT)
    waiting = keep_served_model(wait, manager, update) if ours else wait(manager, update)
    success, _, _ = asyncio.run(waiting)
    assert success is manager.answer
    return manager.served


def test_the_draft_becomes_the_served_model_without_the_row() -> None:
    draft = str(PAIR.draft)
    assert updated(Manager(OURS), draft, ours=False) == (draft, draft)
    assert updated(Manager(OURS, OURS), draft) == SERVED
    assert updated(Manager(OURS, answer=False), draft) == SERVED


def test_new_weights_of_the_target_rename_it_as_sglang_does() -> None:
    target = str(PAIR.target)
    assert updated(Manager(OURS), target) == (target, target)


def test_an_update_that_fails_leaves_the_name() -> None:
    """It does even if the manager has taken the folder's before."""
    manager = Manager(OURS)

    async def fails(manager: Any, update: Any) -> None:
        manager._update_model_path_info(update.model_path, update.load_format)
        raise ConnectionError

    update = SimpleNamespace(model_path=str(PAIR.draft), load_format="auto")
    with pytest.raises(ConnectionError):
        asyncio.run(keep_served_model(fails, manager, update))
    assert manager.served == SERVED


@pytest.mark.parametrize(
    ("manager", "folder", "expected"),
    [
        (Manager(OURS, OURS), PAIR.draft, True),
        (Manager(OURS, OURS), PAIR.target, False),
        (Manager(OURS, draft=None), PAIR.draft, True),
        (Manager({}, draft=None), PAIR.draft, False),
        (Manager({"dflash_builtin_reason": "a flag"}), PAIR.draft, False),
        (Manager(OURS, {}), PAIR.draft, False),
    ],
    ids=["ours", "target", "not given", "plain", "builtin", "one of two"],
)
def test_a_drafts_folder_is_for_the_worker_that_takes_it(
    manager: Manager, folder: Any, expected: bool
) -> None:
    assert asyncio.run(is_for_draft(manager, str(folder))) is expected
