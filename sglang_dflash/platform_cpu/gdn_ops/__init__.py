"""Torch replacements of SGLang's Triton functions for hybrid (Gated DeltaNet) models.

Every function takes the name, the arguments and the layouts of the one that it replaces, and has
the same side effects. A slot index below zero marks a padded row: nothing is read or written for
it, and its outputs are zero.
"""
