"""Servers that share the work of a request."""
