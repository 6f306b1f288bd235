"""Callers' tensors as views of their memory, on the host and on GPUs, and what is computed with their elements."""
