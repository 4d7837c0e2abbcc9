"""The drafter, engine-agnostic: torch, safetensors and the standard library, nothing else."""
