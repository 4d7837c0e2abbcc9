"""Errors that a command tells in a line, log lines, progress bars, and flags from dataclasses. No
torch here."""
