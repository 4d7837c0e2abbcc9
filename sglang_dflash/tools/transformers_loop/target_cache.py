"""Adapter of a Hugging Face target for DFlash: hidden states, and a cache with rollback."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from sglang_dflash.common.errors import ConfigError


class TargetCache:
    """A Hugging Face cache that can be rolled back, recurrent layers included.

    Attention layers drop their last tokens; sliding ones keep all of a block until then. A
    recurrent layer cannot, so its state from before the block is restored and the layer runs over
    the accepted tokens a second time, on the inputs that were recorded in the block (replay).

    Raises:
        ConfigError: a recurrent layer has no sub-module that takes `cache_params`.
    """

    def __init__(self, target: Any, cache: Any) -> None:
        self.cache = cache
        layers = target.get_decoder().layers
        self._recurrent = {
            i: _recurrent_module(layers[i])
            for i, layer in enumerate(cache.layers)
            if hasattr(layer, "recurrent_states")
        }
        self._sliding = [layer for layer in cache.layers if getattr(layer, "is_sliding", False)]
        # The tensors of these are replaced, and not written to.
        self._initial_windows = [
            (layer.keys, layer.values, layer.cumulative_length) for layer in self._sliding
        ]
        self._inputs: dict[int, Tensor] = {}
        self._initial = self._before = self._copy_states()

    def _states(self) -> dict[int, list[Tensor]]:
        """Convolution windows and states of every recurrent layer."""
        layers = {i: self.cache.layers[i] for i in self._recurrent}
        return {
            i: [*layer.conv_states.values(), *layer.recurrent_states.values()]
            for i, layer in layers.items()
        }

    def _copy_states(self) -> dict[int, list[Tensor]]:
        return {i: [t.clone() for t in states] for i, states in self._states().items()}

    def _restore(self, copies: dict[int, list[Tensor]]) -> None:
        for i, states in self._states().items():
            for state, copy in zip(states, copies[i], strict=True):
                state.copy_(copy)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record in this context what `keep` needs: inputs of recurrent layers, and K/V that leaves
        the window of sliding ones."""

        def hook(i: int) -> Callable[..., None]:
            def before(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                self._inputs[i] = args[0] if args else kwargs["hidden_states"]

            return before

        handles = [
            m.register_forward_pre_hook(hook(i), with_kwargs=True)
            for i, m in self._recurrent.items()
        ]
        for layer in self._sliding:
            layer.activate_past_recording()
        try:
            yield
        finally:
            for layer in self._sliding:
                layer.record_past = False
            for handle in handles:
                handle.remove()

    def keep(self, count: int, verify_block: int) -> None:
        """Keep the first `count` of the `verify_block` tokens of the last forward."""
        self._crop(verify_block - count)
        if count < verify_block:
            self._restore(self._before)
            for i, module in self._recurrent.items():
                module(hidden_states=self._inputs[i][:, :count], cache_params=self.cache)
        if self._recurrent:
            self._before = self._copy_states()

    def reset(self, length: int) -> None:
        """Roll back to the state at construction, when the cache held `length` tokens."""
        tokens = self.cache.get_seq_length() - length
        # What has left a window is not in it any more.
        for layer, window in zip(self._sliding, self._initial_windows, strict=True):
            layer.keys, layer.values, layer.cumulative_length = window
        self._crop(tokens, but=self._sliding)
        self._restore(self._initial)

    def _crop(self, tokens: int, but: Sequence[Any] = ()) -> None:
        """Drop the last tokens of attention layers, except `but`. Without a token to drop, sliding
        layers still drop what no later token sees."""
        for i, layer in enumerate(self.cache.layers):
            if i not in self._recurrent and layer not in but:
                layer.crop(-tokens)


@contextmanager
def capture_hidden(target: Any, layer_ids: tuple[int, ...]) -> Iterator[Callable[[], Tensor]]:
    """Capture the outputs of the target's layers `layer_ids` in this context.

    Yields:
        A function that returns the hidden states `[N, F * E]` of row 0 of the last forward.
    """
    layers, outputs = target.get_decoder().layers, {}

    def keep(i: int) -> Callable[..., None]:
        def hook(_module: Any, _inputs: Any, output: Any) -> None:
            outputs[i] = output[0] if isinstance(output, tuple) else output

        return hook

    handles = [layers[i].register_forward_hook(keep(i)) for i in layer_ids]
    try:
        yield lambda: torch.cat([outputs[i][0] for i in layer_ids], dim=-1)
    finally:
        for handle in handles:
            handle.remove()


def _recurrent_module(layer: Any) -> Any:
    """Return the sub-module of a decoder layer that takes `cache_params`. Raises ConfigError."""
    for module in layer.children():
        if "cache_params" in inspect.signature(module.forward).parameters:
            return module
    raise ConfigError(
        "target", type(layer).__name__, "a recurrent layer whose sub-module takes `cache_params`"
    )
