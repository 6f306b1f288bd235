"""What the adapters share: adjoints, gradient options, broadcasts, exported names, Keras callbacks and variables.

Nothing here imports a framework.
"""

ADAPTERS = ("torch", "tensorflow", "keras", "jax")
"""The folders of `collectives` that are adapters."""
