"""What the drafter computes with on a GPU: operations, attention backends, CUDA graphs."""
