"""Triton kernels, one op per file. The twin of an op in torch is in `sglang_dflash.drafting`."""
