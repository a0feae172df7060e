"""Plans made ready to run: kernels, prepared weights, memory."""
