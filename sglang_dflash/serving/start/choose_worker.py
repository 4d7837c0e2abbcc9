"""Choice of the worker for a pair: ours, or SGLang's built-in one if ours cannot serve it. A pair
that neither can serve is refused at start-up."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from sglang.srt.arg_groups.model_override_base import model_config_of
from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view
from sglang.srt.configs.hybrid_arch import mambaish_config
from sglang.srt.runtime_context import get_spec

from sglang_dflash.checkpoint.draft_config import DraftConfig, read_draft
from sglang_dflash.checkpoint.hub import draft_folder
from sglang_dflash.checkpoint.origin import published_draft
from sglang_dflash.checkpoint.precision import other_precision
from sglang_dflash.checkpoint.published import check_target_folder
from sglang_dflash.checkpoint.target_classes import METHOD, TARGETS, unserved_class
from sglang_dflash.checkpoint.tensors import check_weights
from sglang_dflash.common.errors import ConfigError, UnsupportedDraft, shown_pair
from sglang_dflash.common.log import Log
from sglang_dflash.common.machine import version
from sglang_dflash.drafting.attention.backend import choose_attention
from sglang_dflash.drafting.model import DraftModel
from sglang_dflash.drafting.parallel import TensorParallel
from sglang_dflash.drafting.weights import load_model
from sglang_dflash.patches.patch import install_late, verify
from sglang_dflash.serving.gpu.backends import ATTENTION, asked_attention, check_kv_dtype, kv_dtype
from sglang_dflash.serving.metrics.labels import metric_labels
from sglang_dflash.serving.metrics.series import show_info
from sglang_dflash.serving.metrics.server_info import BUILTIN, labels
from sglang_dflash.serving.patches import BUILTIN_PATCHES, PATCHES
from sglang_dflash.serving.start import flags
from sglang_dflash.serving.start.draft_files import check_as_sglang_reads_it, distrust, refuse_code
from sglang_dflash.serving.start.refusal import ends_the_server
from sglang_dflash.serving.start.refused import refuse_ray, refuse_trusted
from sglang_dflash.serving.start.unserved import builtin_reason

logger = Log(__name__)


def check_pair(server_args: Any) -> None:
    """Check a pair in the launching process, before SGLang resolves its speculative settings.

    Raises:
        ConfigError: the draft checkpoint, the pair or our settings cannot work; the message names
            field and value.
    """
    settings = resolving_view(server_args)
    flags.warn_unguarded(settings.tokenizer_worker_num)
    if settings.speculative_algorithm is None and settings.speculative_draft_model_path:
        logger.warning(
            "--speculative-draft-model-path has no effect without --speculative-algorithm: the "
            "server decodes plainly; add --speculative-algorithm DFLASH"
        )
    requested = _dflash_requested(settings)
    uses_another = settings.speculative_algorithm is not None and not requested
    # SGLang reads the draft's config even without an algorithm.
    distrust(None if uses_another else settings.speculative_draft_model_path)
    if not requested:
        flags.warn_without_effect(server_args, "without --speculative-algorithm DFLASH")
        return
    try:
        refuse_ray(settings)
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
    """Check target, draft, options and device. Errors name settings, not flags."""
    builtin = flags.ServerFlags.of(server_args).worker == "builtin"
    if builtin:
        flags.warn_without_effect(server_args, "with --speculative-dflash-worker builtin")
    check_target_folder(settings.model_path)
    refuse_trusted(settings)
    model = model_config_of(server_args)
    _check_target_class(model)
    folder = _folder(settings, weights=not builtin)
    refuse_code(folder)
    try:
        config = None if builtin else DraftConfig.from_pretrained(folder)
    except UnsupportedDraft:
        config = None
    check_as_sglang_reads_it(folder, server_args)
    _warn_of_precision(settings, model, folder)
    if config is None:
        return
    options = flags.options(server_args, settings).resolve(config)
    # Raises if the width flags do not fit the server.
    flags.width_policy(server_args, settings, options)
    replace(options, context=model.context_len).check_room(settings.max_total_tokens)
    if mambaish_config(model) is not None:
        _check_recurrent_target(settings)
    target = model.hf_text_config
    config.check_target(
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        num_layers=target.num_hidden_layers,
        pair=shown_pair(settings.speculative_draft_model_path, settings.model_path),
    )
    if not dummy_weights(settings):
        check_weights(config, folder)
    if unserved(server_args, settings, folder) is None:
        flags.warn_ignored(server_args)
        device = torch.device(settings.device or "cpu")
        _check_device(server_args, settings, config, device)
        # The built-in worker may split the draft otherwise. Raises if heads do not divide.
        with torch.device("meta"):
            DraftModel(config, TensorParallel(size=settings.tp_size))


def _warn_of_precision(settings: Any, model: Any, folder: str) -> None:
    target, draft = settings.model_path, settings.speculative_draft_model_path
    target_config, draft_config = model.hf_config.to_dict(), read_draft(folder)
    for warning in other_precision(target, target_config, draft, draft_config):
        logger.warning("%s", warning)


def _check_device(
    server_args: Any, settings: Any, config: DraftConfig, device: torch.device
) -> None:
    """Raise ConfigError if draft attention or the dtype of draft K/V is not available on it."""
    asked = asked_attention(server_args)
    # SGLang's names are torch's. With auto, the worker judges what the models' configs decide.
    of_models = getattr(torch, settings.dtype, torch.bfloat16)
    draft = settings.speculative_draft_kv_cache_dtype
    dtype = kv_dtype(settings.kv_cache_dtype, draft, asked, of_models)
    check_kv_dtype(dtype, device)
    choose_attention(asked, config, device, ATTENTION, dtype)


def _dflash_requested(settings: Any) -> bool:
    return (settings.speculative_algorithm or "").upper() == "DFLASH"


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
    known = any(map(ModelRegistry.is_arch_supported, names))
    if not known or not hasattr(ModelRegistry.resolve_model_cls(names)[0], METHOD):
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


def dummy_weights(settings: Any) -> bool:
    """Return whether --load-format, or that of the draft, asks for random weights: no file is
    read."""
    return (settings.speculative_draft_load_format or settings.load_format) == "dummy"


def _folder(settings: Any, weights: bool = True) -> str:
    """The local folder of the draft checkpoint. Raises ConfigError."""
    return draft_folder(
        settings.speculative_draft_model_path,
        revision=settings.speculative_draft_model_revision,
        weights=weights and not dummy_weights(settings),
        download_dir=settings.download_dir,
    )


def create_worker(original: Any, algorithm: Any, server_args: Any) -> Any:
    """Around SGLang's choice of the speculative worker's class, in the scheduler process."""
    if not algorithm.is_dflash():
        return original(algorithm, server_args)
    if flags.ServerFlags.of(server_args).worker == "builtin":
        flag = "--speculative-dflash-worker builtin"
        logger.info("SGLang's built-in worker, as requested by %s", flag)
        return builtin_worker(original(algorithm, server_args), flag)
    settings = resolving_view(server_args)
    folder = _folder(settings)
    choice = LateChoice(
        builtin=functools.partial(original, algorithm, server_args),
        load_draft=functools.partial(load_model, folder, dummy=dummy_weights(settings)),
    )
    reason = unserved(server_args, settings, folder)
    return choice if reason is None else choice.fall_back(reason)


@dataclass(frozen=True)
class LateChoice:
    """Stands for the worker's class: SGLang calls it when all plugins have run and the target is
    loaded. Only then can the target's lm_head be examined.

    Attributes:
        builtin: imports SGLang's worker and returns its class.
        load_draft: see `DFlashSpecWorker`.
    """

    builtin: Callable[[], type]
    load_draft: Callable[..., DraftModel]

    def __call__(self, *, server_args: Any, gpu_id: int, nccl_port: int, target_worker: Any) -> Any:
        """Build our worker, or SGLang's."""
        # The launching process, which checks the pair, does not need these modules.
        from sglang_dflash.serving.start.build import DFlashSpecWorker
        from sglang_dflash.serving.start.target_head import unserved_target

        verify(PATCHES)
        reason = unserved_target(target_worker.model_runner.model)
        if reason is None:
            return DFlashSpecWorker(server_args, target_worker, self.load_draft)
        return self.fall_back(reason)(
            server_args=server_args,
            gpu_id=gpu_id,
            nccl_port=nccl_port,
            target_worker=target_worker,
        )

    def fall_back(self, reason: str) -> type:
        """Return the class of SGLang's worker, and log why it serves."""
        logger.warning(
            "SGLang's built-in worker serves instead of sglang-dflash's, because of %s", reason
        )
        return builtin_worker(self.builtin(), reason)


def builtin_worker(theirs: type, reason: str) -> type:
    """Return SGLang's class with the reason why it serves, for `figures.add_report` and
    /metrics."""

    class Builtin(theirs):
        builtin_reason = reason

        def __init__(self, *args: Any, **named: Any) -> None:
            install_late(BUILTIN_PATCHES, "its own DFLASH worker")
            with ends_the_server({}):
                super().__init__(*args, **named)
            spec = get_spec()
            report = {
                "block_size": spec.speculative_num_draft_tokens,
                "window": spec.speculative_draft_window_size,
                "version": version("sglang-dflash"),
            }
            show_info(metric_labels(), {**labels(report), "worker": BUILTIN})

    return Builtin


def unserved(server_args: Any, settings: Any, folder: str) -> str | None:
    """Return the draft feature or server setting that only SGLang's own worker serves, or None."""
    try:
        DraftConfig.from_pretrained(folder)
    except UnsupportedDraft as reason:
        return str(reason)
    return builtin_reason(settings, asked_attention(server_args))
