"""Whole models: captured, fused, explained and tuned."""
