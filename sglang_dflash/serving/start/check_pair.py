"""Check of a pair in the launching process, before a weight is loaded."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from sglang.srt.arg_groups.model_override_base import model_config_of
from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view
from sglang.srt.configs.hybrid_arch import mambaish_config

from sglang_dflash.checkpoint.draft_config import DraftConfig, read_draft
from sglang_dflash.checkpoint.origin import published_draft
from sglang_dflash.checkpoint.precision import other_precision
from sglang_dflash.checkpoint.published import check_target_folder
from sglang_dflash.checkpoint.target_classes import (
    METHOD,
    SILENT,
    TARGETS,
    check_last_layer,
    unserved_class,
)
from sglang_dflash.checkpoint.tensors import check_weights
from sglang_dflash.common.errors import ConfigError, UnsupportedDraft, shown_pair
from sglang_dflash.common.log import Log
from sglang_dflash.drafting.attention.capabilities import choose_attention
from sglang_dflash.drafting.model import DraftModel
from sglang_dflash.drafting.options import asks_dflash
from sglang_dflash.drafting.parallel import TensorParallel
from sglang_dflash.patches.patch import check_ahead
from sglang_dflash.serving.gpu.backends import asked_attention, check_kv_dtype, draft_kv_dtype
from sglang_dflash.serving.hybrid.rollback import replays
from sglang_dflash.serving.patches import BUILTIN_PATCHES, REPLAY_PATCHES, WORKER_PATCHES
from sglang_dflash.serving.start import flags
from sglang_dflash.serving.start.choose_worker import unserved
from sglang_dflash.serving.start.draft_files import (
    check_as_sglang_reads_it,
    distrust,
    dummy_weights,
    local_folder,
    refuse_code,
)
from sglang_dflash.serving.start.refused_settings import refuse_switches, refuse_trusted
from sglang_dflash.serving.start.unserved import BUILTIN_FLAG

logger = Log(__name__)


def check_pair(server_args: Any) -> None:
    """Check a pair in the launching process, before SGLang resolves its speculative settings.

    Raises:
        ConfigError: the draft checkpoint, the pair or our settings cannot work; the message names
            field and value.
        PatchError: a patch of the worker that will serve cannot be applied.
    """
    settings = resolving_view(server_args)
    flags.warn_unguarded(settings.tokenizer_worker_num)
    if settings.speculative_algorithm is None and settings.speculative_draft_model_path:
        logger.warning(
            "--speculative-draft-model-path has no effect without --speculative-algorithm: the "
            "server decodes plainly; add --speculative-algorithm DFLASH"
        )
    requested = asks_dflash(settings.speculative_algorithm)
    uses_another = settings.speculative_algorithm is not None and not requested
    # SGLang reads the draft's config even without an algorithm.
    distrust(None if uses_another else settings.speculative_draft_model_path)
    if not requested:
        flags.warn_without_effect(server_args, "without --speculative-algorithm DFLASH")
        return
    try:
        refuse_switches(settings)
        if settings.speculative_draft_model_path is None:
            _take_published_draft(server_args, settings.model_path)
        _check(server_args, settings)
    except ConfigError as error:
        raise error.named(flags.names(server_args)) from None


def _take_published_draft(server_args: Any, target: str) -> None:
    """Serve with the draft that is published for the target. Raises ConfigError if none is."""
    draft = published_draft(target)
    logger.info("no draft is given; %s is published for %s, and serves", draft, target)
    declare_resolution(server_args, "sglang_dflash", speculative_draft_model_path=draft)
    distrust(draft)


def _check(server_args: Any, settings: Any) -> None:
    """Check target and draft, and what our worker needs if it serves. Errors name settings, not
    flags."""
    asks_builtin = flags.ServerFlags.of(server_args).worker == "builtin"
    check_target_folder(settings.model_path)
    refuse_trusted(settings)
    model = model_config_of(server_args)
    _check_target_class(model)
    folder = local_folder(settings, weights=not asks_builtin)
    refuse_code(folder)
    try:
        config = None if asks_builtin else DraftConfig.from_pretrained(folder)
    except UnsupportedDraft:
        config = None
    check_as_sglang_reads_it(folder, server_args)
    _warn_of_precision(settings, model, folder)
    if config is not None:
        _check_draft(settings, model, config, folder)
    reason = BUILTIN_FLAG if asks_builtin else unserved(server_args, settings, folder)
    if config is None or reason is not None:
        flags.warn_without_effect(server_args, f"with SGLang's built-in worker ({reason})")
        check_ahead(BUILTIN_PATCHES)
    else:
        _check_ours(server_args, settings, model, config)


def _check_draft(settings: Any, model: Any, config: DraftConfig, folder: str) -> None:
    """Raise ConfigError if the draft does not fit the target, whichever worker serves."""
    if mambaish_config(model) is not None:
        _check_recurrent_target(settings)
    target = model.hf_text_config
    config.check_target(
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        num_layers=target.num_hidden_layers,
        pair=shown_pair(settings.speculative_draft_model_path, settings.model_path),
    )
    names = model.hf_config.architectures
    check_last_layer(config.target_layer_ids, target.num_hidden_layers, names)
    if not dummy_weights(settings):
        check_weights(config, folder)


def _check_ours(server_args: Any, settings: Any, model: Any, config: DraftConfig) -> None:
    """Raise ConfigError for what our worker cannot serve and the built-in one may: it is not asked
    of a server that falls back to that one. Raise PatchError if our worker's patches cannot be
    applied."""
    options = flags.flag_options(server_args, settings).resolve(config)
    # Raises if the width flags do not fit the server.
    flags.width_policy(server_args, settings, options)
    replace(options, context=model.context_len).check_room(settings.max_total_tokens)
    flags.warn_ignored(server_args)
    _check_device(server_args, settings, config)
    # The built-in worker may split the draft otherwise. Raises if heads do not divide.
    with torch.device("meta"):
        DraftModel(config, TensorParallel(size=settings.tp_size))
    # A scheduler process applies them when it has loaded the target.
    verifies = settings.disaggregation_mode != "prefill"
    replayed = verifies and replays(options.recurrent_rollback, model)
    needed = WORKER_PATCHES + (REPLAY_PATCHES if replayed else ())
    if model.quantization is not None:
        # Its lm_head, once loaded, may be one that only the built-in worker serves.
        needed += BUILTIN_PATCHES
    check_ahead(needed)


def _warn_of_precision(settings: Any, model: Any, folder: str) -> None:
    target, draft = settings.model_path, settings.speculative_draft_model_path
    target_config, draft_config = model.hf_config.to_dict(), read_draft(folder)
    for warning in other_precision(target, target_config, draft, draft_config):
        logger.warning("%s", warning)


def _check_device(server_args: Any, settings: Any, config: DraftConfig) -> None:
    """Raise ConfigError if draft attention or the dtype of draft K/V is not available there."""
    device = torch.device(settings.device or "cpu")
    # SGLang's names are torch's. With auto, the worker judges what the models' configs decide.
    model_dtype = getattr(torch, settings.dtype, torch.bfloat16)
    dtype = draft_kv_dtype(server_args, model_dtype)
    check_kv_dtype(dtype, device)
    kv_dtype = str(dtype).removeprefix("torch.")
    choose_attention(asked_attention(server_args), config, device.type, kv_dtype)


def _check_target_class(model: Any) -> None:
    """Raise ConfigError if SGLang's class of the target, which it has not loaded yet, lacks what
    every DFLASH worker calls."""
    names = model.hf_config.architectures
    if model.model_impl not in ("auto", "sglang"):
        required = f"its classes have no {METHOD}, which DFLASH calls: leave it out"
        raise ConfigError("--model-impl", str(model.model_impl), required)
    if names[0] in TARGETS:
        return
    from sglang.srt.models.registry import ModelRegistry  # Imports every model.

    # SGLang serves an unknown architecture with its class for Transformers' models.
    is_native = any(map(ModelRegistry.is_arch_supported, names))
    is_asked = is_native and hasattr(ModelRegistry.resolve_model_cls(names)[0], METHOD)
    if not is_asked or names[0] in SILENT:
        raise unserved_class(model.model_path, names)


def _check_recurrent_target(settings: Any) -> None:
    """Raise ConfigError for settings that a target with recurrent layers cannot serve."""
    if settings.enable_streaming_session:
        raise ConfigError(
            "--enable-streaming-session",
            required="not supported for targets with recurrent layers: a turn could start from a "
            "state that includes tokens that were not returned to the client. Use sessions without "
            "streaming",
        )
