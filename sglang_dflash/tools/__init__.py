"""The `sglang-dflash` command and what it runs. The product imports none of it."""
