"""The published benchmark command: `python -m sglang_dflash.benchmark`.

A front end of `sglang_dflash.bench` for servers, and of `sglang_dflash.transformers_loop` for a
pair over Transformers, shared out over the ranks of torchrun.
"""
