"""The tokens of a draft that has an lm_head for a part of the vocabulary (`draft_vocab_size`)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from sglang_dflash.checkpoint.draft_config import DraftConfig
from sglang_dflash.common.errors import ConfigError

# Tensors of the checkpoint: the distance of each token from its row, as in EAGLE-3 drafts; and
# whether each token of the vocabulary has a row, which may be left out.
D2T, T2D = "d2t", "t2d"


def check_map(config: DraftConfig, tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> set[str]:
    """The names of these tensors in a draft of that config.

    Args:
        tensors: name -> dtype and shape, from headers.

    Raises:
        ConfigError: one is missing, or has another dtype or shape.
    """
    if config.draft_vocab_size is None:
        return set()
    forms = {D2T: ("I64", (config.draft_vocab_size,)), T2D: ("BOOL", (config.vocab_size,))}
    if D2T not in tensors:
        raise _error(D2T, "missing; draft_vocab_size needs it")
    for name, form in forms.items():
        dtype, shape = tensors.get(name, form)
        if (dtype, shape) != form:
            required = f"{form[0]} of shape {list(form[1])} is required"
            raise _error(name, f"{dtype} of shape {list(shape)}; {required}")
    return set(forms)


def token_ids(config: DraftConfig, tensors: Mapping[str, np.ndarray]) -> np.ndarray:
    """The token of each row of the draft's lm_head, int64 `[draft_vocab_size]`, ascending.

    Args:
        tensors: those of `check_map`.

    Raises:
        ConfigError: they are not distinct tokens of the vocabulary in ascending order, or `t2d` has
            others.
    """
    ids = tensors[D2T] + np.arange(len(tensors[D2T]))
    if ids[0] < 0 or ids[-1] >= config.vocab_size or not (np.diff(ids) > 0).all():
        tokens = f"distinct tokens from 0 to {config.vocab_size - 1}"
        raise _error(D2T, f"offsets of rows to {tokens}, in ascending order, are required")
    if T2D in tensors and not np.array_equal(np.flatnonzero(tensors[T2D]), ids):
        raise _error(T2D, f"the tokens of {D2T} are required, it has others")
    return ids


def _error(name: str, required: str) -> ConfigError:
    return ConfigError(f"tensor {name} of the draft", required=required)
