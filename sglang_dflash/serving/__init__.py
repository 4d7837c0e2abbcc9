"""The SGLang adapter: plugin, flags and the DFLASH worker."""
