"""The table of settings with which SGLang's own worker serves names every flag of SGLang's that our
worker does not follow."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import get_type_hints

from sglang.srt.arg_groups import choices
from sglang.srt.arg_groups.fields.spec import Spec

from sglang_dflash.serving.gpu.backends import ATTENTION, asked_attention
from sglang_dflash.serving.start.unserved import IGNORED, UNSERVED, builtin_reason
from tests.serving.start.test_start_up import NOT_OURS

# That our worker follows, or the target does, beside another draft, too; and three of which SGLang
# itself says that they have no effect with DFLASH.
FOLLOWED = {
    "--speculative-algorithm", "--speculative-draft-model-path",
    "--speculative-draft-model-revision", "--speculative-num-draft-tokens",
    "--speculative-dflash-block-size", "--speculative-draft-attention-backend",
    "--speculative-draft-kv-cache-dtype", "--speculative-draft-window-size",
    "--speculative-draft-sink-size",
    "--speculative-attention-mode", "--speculative-dsa-topk-backend",
    "--speculative-num-steps", "--speculative-eagle-topk", "--speculative-adaptive",
}  # fmt: skip


def test_every_flag_of_sglangs_is_followed_unserved_or_ignored() -> None:
    unserved = {flag for row in UNSERVED for flag in re.findall(r"--[a-z-]+", row.setting)}
    hints = get_type_hints(Spec, include_extras=True)
    names = [name for name in hints if name.startswith("speculative_")]
    assert len(names) > 20
    for name in names:
        if getattr(hints[name].__metadata__[0], "no_cli", False):
            continue
        flag = "--" + name.replace("_", "-")
        ignored = [row for row in IGNORED if row.has(flag)]
        assert (flag in FOLLOWED | unserved) + len(ignored) == 1, flag


def test_every_row_is_tried() -> None:
    """Rows are tried in test_start_up.py, except for two in test_precision.py."""
    tried = {reason.split(" ")[0] for reason in NOT_OURS} | {"SGLANG_ENABLE_PP_SPEC"}
    own = {"--speculative-draft-model-quantization", "a"}
    assert {row.setting.split(" ")[0] for row in UNSERVED} == tried | own


def test_every_attention_of_sglangs_is_ours_or_in_the_table() -> None:
    class Nothing:
        def __getattr__(self, name: str) -> None:
            return None

    for name in choices.DRAFT_ATTENTION_BACKEND_CHOICES:
        # Our CPU platform adds SGLang's name for torch, if another test has loaded it.
        asked = asked_attention(SimpleNamespace(speculative_draft_attention_backend=name))
        reason = builtin_reason(Nothing(), asked)
        assert (reason is None) == (asked in ATTENTION), name
