"""The draft side on a GPU, without SGLang: checked against torch, and timed against its floor."""
