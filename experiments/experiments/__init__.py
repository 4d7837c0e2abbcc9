"""One module per experiment. Its docstring describes it, and `EXPERIMENT` is what runs."""
