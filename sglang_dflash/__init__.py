"""DFlash block-diffusion speculative decoding for SGLang and Transformers."""
