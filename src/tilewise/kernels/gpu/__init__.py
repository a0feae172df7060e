"""Triton kernels, channels-last; importing a module of this package imports Triton."""
