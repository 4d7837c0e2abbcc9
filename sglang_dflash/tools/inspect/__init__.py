"""Pre-flight: whether a pair can be served and what it costs, before any weight is loaded."""
