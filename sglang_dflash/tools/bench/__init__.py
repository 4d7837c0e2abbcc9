"""Benchmarks: servers, the client that measures them, the check of outputs, and reports."""
