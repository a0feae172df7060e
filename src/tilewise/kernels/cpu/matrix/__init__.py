"""The same convolutions on a matrix unit."""
