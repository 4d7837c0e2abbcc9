"""Errors that a command tells in a line, log lines, and flags from dataclasses. No torch here."""
