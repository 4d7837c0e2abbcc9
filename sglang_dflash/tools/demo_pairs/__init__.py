"""The embedded demo pairs."""
