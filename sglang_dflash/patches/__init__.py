"""Patches of SGLang: one row per change, checked before it is applied."""
