"""The version of Keras that ``tf.keras`` is."""

import tensorflow as tf

LEGACY = not hasattr(tf.keras, "version") or tf.keras.version().startswith("2.")
"""Whether ``tf.keras`` is Keras 2, the package ``tf_keras`` (``TF_USE_LEGACY_KERAS=1``)."""
