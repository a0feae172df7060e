"""filter2d, for arrays and tensors."""
