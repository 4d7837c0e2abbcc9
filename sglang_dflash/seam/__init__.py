"""How we patch SGLang: one row per change, checked before it is applied."""
