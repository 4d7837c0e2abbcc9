"""The draft heads that we serve: what turns the draft's hidden states into drafted tokens. Their
keys, tensors and bytes are in `checkpoint/heads/`."""

from __future__ import annotations

from collections.abc import Mapping

from sglang_dflash.checkpoint.heads.dflash2 import DFlash2Config
from sglang_dflash.checkpoint.heads.head import HeadConfig
from sglang_dflash.drafting.heads.dflash2 import DFlash2Module
from sglang_dflash.drafting.heads.plain import HeadModule

# The network of each of `HEAD_CONFIGS`.
HEAD_MODULES: Mapping[type[HeadConfig], type[HeadModule]] = {
    HeadConfig: HeadModule,
    DFlash2Config: DFlash2Module,
}
