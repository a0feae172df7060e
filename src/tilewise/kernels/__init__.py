"""Code generators: what they know is tiles, not networks."""
