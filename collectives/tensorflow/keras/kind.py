"""Which Keras ``tf.keras`` is."""

import tensorflow as tf

LEGACY = not hasattr(tf.keras, "version") or tf.keras.version().startswith("2.")
"""Whether it is ``tf_keras``."""

if not LEGACY and tf.keras.backend.backend() != "tensorflow":
    raise ImportError(
        f"collectives.tensorflow.keras: Keras runs on {tf.keras.backend.backend()}; import collectives.keras as hvd, "
        f"or set"
        " KERAS_BACKEND=tensorflow"
    )
