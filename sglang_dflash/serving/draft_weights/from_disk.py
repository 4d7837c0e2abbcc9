"""New weights for the draft by `/update_weights_from_disk`, in the process that answers HTTP."""

from __future__ import annotations

from typing import Any

from sglang_dflash.checkpoint.draft_keys import is_draft
from sglang_dflash.patches.restored import restored


async def is_for_draft(manager: Any, folder: str) -> bool:
    """Return whether the folder holds a draft and our worker serves, which checks and loads it."""
    if not is_draft(folder):
        return False
    # They tell it of a draft that was not given, too: the published one.
    return all("dflash" in state for state in await manager.get_internal_state())


async def keep_served_model(original: Any, manager: Any, obj: Any) -> Any:
    """Around `TokenizerManager._wait_for_model_update_from_disk`: the served model keeps its name
    and folder if only its draft has new weights."""
    if not await is_for_draft(manager, obj.model_path):
        return await original(manager, obj)
    with restored(manager, "served_model_name", "model_path"):
        return await original(manager, obj)
