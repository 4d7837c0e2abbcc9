"""DFlash over a Hugging Face Transformers target, without a server."""
