"""The drafter's operations, attention backends and CUDA graphs on a GPU."""
