"""Kernels for a CUDA device, in Triton."""
