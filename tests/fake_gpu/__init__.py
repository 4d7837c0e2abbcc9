"""A faked Hopper GPU: a whole SGLang server runs its CUDA path on a machine without one.

`ServerConfig.on_fake_gpu()` starts a server on it; `python -m tests.fake_gpu MODULE ARGUMENTS` runs
any module. Nothing of the product imports it.

- A tensor on `cuda` (`tensor.py`) is a wrapper around a host tensor, with the device and the errors
  of a GPU's: two devices in one operation are refused, and Triton refuses a pointer of the host.
- Device memory is the bytes of live storages, and every wait of the host is counted by the place in
  the code (`gpu.py`).
- A CUDA graph is the list of a capture's operations and launches, run again on the same memory
  (`graph.py`). A capture runs nothing, and refuses what CUDA refuses.
- Triton kernels run in Triton's interpreter (`interpreter.py`). Compiled kernels, those of
  sgl_kernel and of SGLang's JIT, are torch code by name (`kernels/`); one that is missing says so.
  They take float32, which real ones refuse: answers are then comparable with a CPU's, to the bit.

It does not show time, races between streams, numerics and limits of compiled kernels, the memory of
graph pools, or NCCL (ranks talk over gloo).
"""
