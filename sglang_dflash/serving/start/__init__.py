"""Start-up: flags, the choice of the worker, the memory plan, and the worker made of its parts."""
