"""Kernels for a CUDA device, in Triton, and what goes to a device and comes back."""
