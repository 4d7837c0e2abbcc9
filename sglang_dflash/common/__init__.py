"""Errors that a command tells in a line, log lines, progress bars, files of results, and flags from
dataclasses. No torch here."""
