"""Attention of a drafted block over its context and itself.

`backend` is the interface, `capabilities` the table of backends, `visibility` says what may be
seen, `reference` computes it in torch. For a faster backend see CONTRIBUTING.md.
"""
