"""The draft as the published snippet uses it: `from_pretrained(...)`, then `spec_generate(...)`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from sglang_dflash.checkpoint.fields import read_json_object
from sglang_dflash.checkpoint.hub import draft_folder
from sglang_dflash.common.errors import ConfigError
from sglang_dflash.drafting.model import DraftModel
from sglang_dflash.drafting.options import Options
from sglang_dflash.drafting.rope import Rotary
from sglang_dflash.drafting.weights import load_model
from sglang_dflash.tools.transformers_loop.checks import find_device, find_dtype, stop_ids
from sglang_dflash.tools.transformers_loop.generation import Sampler, spec_generate


class DFlashDraftModel(DraftModel):
    """A DFlash draft over Transformers, called as z-lab's model cards show.

    Example::

        draft = DFlashDraftModel.from_pretrained(
            "z-lab/Qwen3-8B-DFlash-b16", dtype="auto", device_map="cuda:0"
        ).eval()
        output = draft.spec_generate(
            input_ids=input_ids, max_new_tokens=2048, temperature=0.0, target=target,
            stop_token_ids=[tokenizer.eos_token_id],
        )
    """

    @classmethod
    def from_pretrained(
        cls,
        name: str,
        *,
        dtype: str | torch.dtype | None = "auto",
        device_map: str | int | torch.device | Mapping[str, Any] | None = None,
        trust_remote_code: bool | None = None,
        revision: str | None = None,
    ) -> DFlashDraftModel:
        """Load a draft, frozen for inference.

        Args:
            name: a folder or a hub name.
            dtype: a torch dtype or its name; "auto" and None for the checkpoint's.
            device_map: the device; None for the CPU, "auto" for the accelerator if there is one.
            trust_remote_code: accepted for the published snippet. No code of the checkpoint runs.
            revision: a branch, tag or commit of the hub.

        Raises:
            ConfigError: the draft cannot be loaded, or an argument is not one of these.
        """
        del trust_remote_code
        device = _device(device_map)
        given_dtype = None if dtype in (None, "auto") else find_dtype("dtype", dtype)
        folder = draft_folder(str(name), revision=revision)
        model_dtype = given_dtype or _stored_dtype(folder)
        return cast(
            "DFlashDraftModel",
            load_model(folder, dtype=model_dtype, device=device, model_class=cls),
        )

    @property
    def block_size(self) -> int:
        return self.config.block_size

    def spec_generate(
        self,
        target: Any,
        input_ids: Any,
        max_new_tokens: int,
        stop_token_ids: Iterable[int] | None = None,
        temperature: float = 0.0,
        *,
        options: Options | None = None,
    ) -> Tensor:
        """Generate after a prompt, with the arguments and the result of z-lab's `spec_generate`.

        Args:
            target: the causal language model of Transformers that this draft was trained for.
            input_ids: int64 `[1, N]`, or what a tokenizer returns for one prompt.
            max_new_tokens: generated tokens at most.
            stop_token_ids: the text ends with the first of these that is generated; None for none.
            temperature: 0 is greedy.
            options: block size and context window.

        Returns:
            int64 `[1, N + generated]` on the target's device: the prompt, then what was generated,
            a stop token included.

        Raises:
            ConfigError: see `transformers_loop.spec_generate`; the temperature is out of range.
        """
        choose = Sampler(temperature)
        if temperature < 1e-5:  # As in z-lab's code, which takes the argmax then.
            choose = Sampler()
        new = spec_generate(
            self,
            target,
            input_ids,
            max_new_tokens,
            options=options,
            stop_token_ids=stop_ids(stop_token_ids),
            choose=choose,
        )
        prompt = input_ids["input_ids"] if isinstance(input_ids, Mapping) else input_ids
        prompt = prompt.to(device=self.device, dtype=torch.int64)
        return torch.cat([prompt, torch.tensor([new.tokens], device=self.device)], dim=1)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> DFlashDraftModel:
        """Recompute what is derived from the weights. `to`, `cuda` and `float` call this."""
        super()._apply(fn, recurse)
        config = self.config
        # RoPE's frequencies stay float32 whatever the dtype of the weights.
        rotary = Rotary(config.rope, config.head_dim, config.max_position_embeddings)
        self.rotary = rotary.to(self.device)
        self._joined = None
        self.freeze()
        return self


def _device(device_map: str | int | torch.device | Mapping[str, Any] | None) -> torch.device:
    named = set(device_map.values()) if isinstance(device_map, Mapping) else {device_map}
    if len(named) != 1:
        raise ConfigError("device_map", device_map, "one device for the whole draft")
    (name,) = named
    if name is None:
        name = "cpu"
    # Accelerate's names of ways to spread a model over devices. A draft stays on one device.
    if name in ("auto", "balanced", "balanced_low_0", "sequential"):
        name = torch.accelerator.current_accelerator(check_available=True) or "cpu"
    return find_device("device_map", name)


def _stored_dtype(folder: str) -> torch.dtype:
    """Return the dtype that a draft's config.json names; float32 if it names none."""
    raw = read_json_object(Path(folder) / "config.json", "draft checkpoint")
    named = [(field, raw[field]) for field in ("dtype", "torch_dtype") if raw.get(field)]
    named_dtypes = [(field, name) for field, name in named if name != "auto"]
    return find_dtype(*named_dtypes[0]) if named_dtypes else torch.float32
