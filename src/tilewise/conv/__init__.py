"""conv2d and its kin as operators of torch."""
