"""Callers' tensors as views of their memory, on the host and on GPUs, and computations on their elements."""
