"""Plugins beside DFLASH: repairs of SGLang for every server, and SGLang on a plain CPU."""
