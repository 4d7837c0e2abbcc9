"""The draft heads that we serve, by the files of a checkpoint. Their networks are in
`drafting/heads/`."""

from __future__ import annotations

from sglang_dflash.checkpoint.fields import Fields
from sglang_dflash.checkpoint.heads.dflash2 import DFlash2Config
from sglang_dflash.checkpoint.heads.head import HeadConfig

# The first one is that of drafts without the keys of another one.
HEAD_CONFIGS: tuple[type[HeadConfig], ...] = (HeadConfig, DFlash2Config)


def read_head(fields: Fields) -> HeadConfig:
    """The head of a draft with these fields. Raises ConfigError, also if they have two heads."""
    heads = [head for each in HEAD_CONFIGS[1:] if (head := each.read(fields)) is not None]
    if len(heads) > 1:
        keys = [next(name for name in head.keys if name in fields) for head in heads]
        raise fields.error(keys[1], f"beside {keys[0]}, of another draft head, none")
    return heads[0] if heads else HEAD_CONFIGS[0]()


def head_keys() -> frozenset[str]:
    """The keys of all heads in config.json."""
    return frozenset(name for head in HEAD_CONFIGS for name in head.keys)


def architectures() -> tuple[str, ...]:
    """The `architectures` of all heads."""
    return tuple(dict.fromkeys(name for head in HEAD_CONFIGS for name in head.architectures))


def speculators_types() -> tuple[str, ...]:
    """The `speculators_model_type` of all heads that the speculators library has."""
    return tuple(
        dict.fromkeys(head.speculators_type for head in HEAD_CONFIGS if head.speculators_type)
    )


def is_table(tensor: str) -> bool:
    """Return whether a tensor of that name is a head's table, of which a step reads single rows."""
    return any(tensor in head.tables for head in HEAD_CONFIGS)
