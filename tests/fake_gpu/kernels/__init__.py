"""Torch code in place of compiled kernels, by the name under which SGLang calls them."""
