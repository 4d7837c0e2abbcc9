"""Counters, warnings and reports."""
