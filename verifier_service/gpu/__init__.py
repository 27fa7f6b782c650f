"""Triton kernels for a CUDA device, and copies between host and device."""
