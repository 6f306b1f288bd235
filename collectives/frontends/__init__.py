"""What the adapters for Keras 3 and for ``tf_keras`` have in common; it imports neither, and no framework."""
