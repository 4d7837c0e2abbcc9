"""Triton kernels: one op per file, with the arguments of its torch twin in `sglang_dflash.core`."""
