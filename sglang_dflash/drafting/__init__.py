"""The drafter, without an engine. Beside torch it needs safetensors and Transformers, and
compressed-tensors for weights in its packed format."""
