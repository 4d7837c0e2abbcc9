"""Experiments about our own design, beside their results: `python -m experiments --help`."""
