"""Folders of published models without their weights, for servers with `--load-format dummy`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from sglang_dflash.checkpoint.published import look_up
from sglang_dflash.common.errors import ConfigError

# The context length of a target whose published facts name none.
CONTEXT = 65536


def folder_of(role: str, name: str, home: Path) -> Path:
    """Return the folder `name`, or make one in `home` with the config.json of a published model.

    Args:
        role: "target" or "draft".

    Raises:
        ConfigError: too little is known about the model, or Transformers has no causal language
            model of a target's type.
    """
    facts = look_up(role, name, offline=True)
    if Path(name).exists():
        return Path(name)
    if facts.unknown:
        lacking = ", ".join(facts.unknown)
        raise ConfigError(role, name, f"a folder with its config.json; not known here: {lacking}")
    config = dict(facts.config) if role == "draft" else complete_config(name, facts.config)
    if role == "draft" and "sliding_attention" in config.get("layer_types", ()):
        # Otherwise Transformers' class drops sliding_window, which SGLang's worker reads.
        config.setdefault("use_sliding_window", True)
    folder = home / facts.name.replace("/", "--")
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}, indent=1))
    return folder


def write_draft_weights(folder: Path) -> None:
    """Give a draft's folder random weights, normal with standard deviation 0.02; norms are 1.

    With SGLang's own dummy weights (norms, too, of at most 0.001) its worker drafts one token for
    every position, request and step. A GPU takes less power to verify equal rows, and clocks
    higher.
    """
    import torch

    from sglang_dflash.drafting.weights import load_model, save_model

    config = json.loads((folder / "config.json").read_text())
    model = load_model(folder, dtype=torch.bfloat16, dummy=True)
    save_model(model, config, folder, torch.bfloat16)


def context_of(folders: Iterable[Path]) -> int | None:
    """Return the longest context that all of these models support, in tokens; None if no config
    names it."""
    configs = [json.loads((folder / "config.json").read_text()) for folder in folders]
    lengths = [c.get("text_config", c).get("max_position_embeddings") for c in configs]
    return min(filter(None, lengths), default=None)


def complete_config(name: str, published: Mapping[str, Any]) -> dict[str, Any]:
    """Complete the config of a target's language model. Missing fields, none of which changes the
    size of a layer, get the defaults of its class in Transformers.

    Raises:
        ConfigError: Transformers has no such causal language model.
    """
    from transformers import CONFIG_MAPPING, AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    fields = {"max_position_embeddings": CONTEXT, **published.get("text_config", published)}
    model_type = fields.pop("model_type")
    if f"{model_type}_text" in CONFIG_MAPPING:
        model_type += "_text"
    architecture = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type)
    if architecture is None:
        required = f"a folder with its config.json; Transformers does not know {model_type!r}"
        raise ConfigError("target", name, required)
    fields["architectures"] = [architecture]
    # SGLang reads fields that Transformers' class drops, such as full_attention_interval.
    return {**fields, **AutoConfig.for_model(model_type, **fields).to_dict()}
