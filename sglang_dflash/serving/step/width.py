"""The verify width of every decode step: what the policy needs to know of SGLang's batches."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from sglang_dflash.drafting.parallel import TensorParallel
from sglang_dflash.drafting.width import AdaptiveWidth, FixedWidth, WidthPolicy
from sglang_dflash.facts.errors import ConfigError, shown
from sglang_dflash.serving.start import flags
from sglang_dflash.serving.step.batch import ScheduleBatch
from sglang_dflash.serving.step.clock import HostClock, StepClock, StepShape
from sglang_dflash.serving.step.target_tokens import takes_one_token

logger = logging.getLogger(__name__)

WIDTH_FLAG, WIDTHS_FLAG = "--speculative-dflash-width", "--speculative-dflash-widths"
# Widths below the block size that are tried by default.
DEFAULT_WIDTHS = (1, 4, 8)
# Steps without drafts, or with, before a line in the log.
LONG = 256


def make_policy(kind: str, widths: Sequence[int] | None, block_size: int) -> WidthPolicy:
    """The policy that the flags name.

    Args:
        kind: "fixed" or "adaptive".
        widths: of --speculative-dflash-widths; None for the default.
        block_size: B.

    Raises:
        ConfigError: the widths do not fit the block size, or are given with a fixed width.
    """
    if kind == "fixed":
        if widths is not None:
            raise ConfigError(
                f"{WIDTHS_FLAG}: {shown(list(widths))} has no effect with {WIDTH_FLAG} fixed; give "
                "adaptive, or leave it out"
            )
        return FixedWidth(block_size)
    if widths is None:
        widths = (*(width for width in DEFAULT_WIDTHS if width < block_size), block_size)
    if widths[0] != 1 or widths[-1] != block_size or list(widths) != sorted(set(widths)):
        raise ConfigError(
            f"{WIDTHS_FLAG}: {','.join(map(str, widths))}; give ascending numbers from 1 (plain "
            f"decoding) to the block size, {block_size}"
        )
    return AdaptiveWidth(widths)


def check_width(server_args: Any, settings: Any, block_size: int) -> None:
    """Whether the width flags fit the server.

    Raises:
        ConfigError: they do not.
    """
    kind, widths = flags.width(server_args)
    make_policy(kind, widths, block_size)
    if kind == "fixed":
        return
    if settings.enable_deterministic_inference:
        raise ConfigError(
            f"{WIDTH_FLAG}: 'adaptive' depends on how long steps take, and "
            "--enable-deterministic-inference is given; give fixed"
        )
    device = settings.device or "cpu"
    if device not in ("cpu", "cuda"):
        raise ConfigError(
            f"{WIDTH_FLAG}: 'adaptive' is served on CPUs and CUDA, not on {device!r}; give fixed"
        )
    if device == "cuda" and _verifies_with_flashinfer(settings):
        raise ConfigError(
            f"{WIDTH_FLAG}: 'adaptive' verifies single tokens, and FlashInfer's kernel for "
            "recurrent layers is for more than one; give --linear-attn-verify-backend triton"
        )
    if device == "cuda" and settings.enable_lora:
        raise ConfigError(
            f"{WIDTH_FLAG}: 'adaptive' has CUDA graphs of several widths, and SGLang keeps the "
            "buffers of LoRA for one; give fixed, or leave out --enable-lora"
        )


def _verifies_with_flashinfer(settings: Any) -> bool:
    """Whether recurrent layers would, by SGLang's rule (layers/attention/linear/utils.py)."""
    decode = settings.linear_attn_decode_backend or settings.linear_attn_backend
    return (settings.linear_attn_verify_backend or decode) == "flashinfer"


class PrometheusWidths:
    """Steps by width in /metrics, with the labels of SGLang's own series."""

    def __init__(self, labels: Mapping[str, Any], widths: Sequence[int]) -> None:
        # Imported late: SGLang first sets the directory in which its processes share metrics.
        from prometheus_client import Counter

        steps = Counter(
            "sglang_dflash_steps", "Decode steps of a batch, by verify width.", [*labels, "width"]
        )
        self._steps = {width: steps.labels(**labels, width=width) for width in widths}

    def add(self, width: int) -> None:
        """Count a step."""
        self._steps[width].inc()


class StepWidths:
    """Chooses widths, measures steps, and passes outcomes on to the policy."""

    def __init__(
        self,
        policy: WidthPolicy,
        tp: TensorParallel,
        labels: Mapping[str, Any] | None = None,
        clock: StepClock | None = None,
    ) -> None:
        """
        Args:
            labels: of this process's series in /metrics; None for none.
            clock: measures steps; None for the host's.
        """
        self.policy, self._tp, self._clock = policy, tp, clock or HostClock()
        self._prometheus = None if labels is None else PrometheusWidths(labels, policy.widths)
        self._is_fixed = len(policy.widths) == 1
        self._steps_alike, self._drafts, self._told = 0, True, True

    def choose(self, batch: ScheduleBatch) -> int:
        """The width of the step that begins now."""
        width = self.policy.widths[0] if self._is_fixed else self._chosen(batch)
        if self._prometheus is not None:
            self._prometheus.add(width)
        return width

    def _chosen(self, batch: ScheduleBatch) -> int:
        for seconds, shape in self._clock.begins():
            self.policy.took(seconds, *shape)
        drafting, undrafted, context, most = [], 0, 0, 0
        for request in batch.reqs:
            if takes_one_token(request):
                undrafted += 1
            else:
                drafting.append(request.rid)
            output = len(request.output_ids)
            context = max(context, len(request.origin_input_ids) + output)
            most = max(most, request.sampling_params.max_new_tokens - output)
        # Durations differ between ranks.
        width = self._tp.from_first(self.policy.choose(drafting, context, most, undrafted))
        self._clock.is_of(StepShape(len(batch.reqs), context, width))
        self._tell()
        return width

    def begins_now(self) -> None:
        """What the step has done so far is not its own: the work of steps before it."""
        self._clock.begins_now()

    def interrupted(self) -> None:
        """Something else than a decode step runs: the time since the last one is not its own."""
        self._clock.interrupted()

    def observe(self, width: int, accepted: Mapping[str, int]) -> None:
        """Outcome of a step, by request: accepted drafts of those that took drafts and live."""
        if not self._is_fixed:
            self.policy.observe(list(accepted), width, list(accepted.values()))

    def _tell(self) -> None:
        """One line if plain decoding lasts, and one if drafting is back to stay."""
        drafts = self.policy.drafts
        self._steps_alike = self._steps_alike + 1 if drafts == self._drafts else 0
        self._drafts = drafts
        if self._steps_alike < LONG or drafts == self._told or self._tp.rank:
            return
        self._told = drafts
        logger.info(
            "DFLASH: %s",
            "drafting is faster than plain decoding again"
            if drafts
            else "plain decoding is faster than drafting for what is served now; a step now and "
            "then tries drafts again",
        )
