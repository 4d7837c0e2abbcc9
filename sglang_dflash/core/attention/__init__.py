"""Attention of a drafted block over its context and itself."""
