"""Shared by the adapters: adjoints, gradient options, broadcasts, exported names, Keras callbacks and variables.

This package imports no framework.
"""

ADAPTERS = ("torch", "c10d", "tensorflow", "keras", "jax")
"""The folders of `collectives` that are adapters."""
