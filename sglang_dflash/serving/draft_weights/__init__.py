"""Weights of the draft that a server is given while it runs, and those that SGLang's own worker
reads."""
