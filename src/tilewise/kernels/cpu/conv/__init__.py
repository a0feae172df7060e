"""Kernels of convolutions, in vectors."""
