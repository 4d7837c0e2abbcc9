"""DFlash block-diffusion speculative decoding for SGLang."""

from importlib.metadata import version as _version

__version__ = _version("sglang-dflash")
