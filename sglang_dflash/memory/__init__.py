"""Bytes of weights, K/V, states and draft steps: a server and `sglang-dflash inspect` call the same
functions. No torch here."""
