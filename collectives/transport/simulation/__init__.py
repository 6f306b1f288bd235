"""A simulated network of thousands of ranks."""
