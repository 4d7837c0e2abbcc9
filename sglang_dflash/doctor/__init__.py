"""`sglang-dflash doctor`: what is wrong with a running server, and what to do."""
