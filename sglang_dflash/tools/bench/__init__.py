"""Measuring: servers to measure, a client that measures them, and the demo."""
