"""Start-up: flags, the choice of the worker, the memory reserved for it, and the worker made of its
parts."""
