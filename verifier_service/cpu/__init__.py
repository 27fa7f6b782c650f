"""Kernels for a CPU, compiled for the machine that runs them: attention, linear layers, what stands between them."""
