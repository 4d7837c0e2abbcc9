"""Repairs of SGLang for every server, with and without DFLASH."""
