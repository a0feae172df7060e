"""Kernels of image filters."""
