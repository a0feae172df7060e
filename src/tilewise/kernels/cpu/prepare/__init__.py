"""Weights, packed and transformed for the kernels; and whether they changed."""
