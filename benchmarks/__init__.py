"""Experiments about our own design, beside their results."""
