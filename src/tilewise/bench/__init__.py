"""Measuring: contenders, peers, result files, the ladder and the report."""
