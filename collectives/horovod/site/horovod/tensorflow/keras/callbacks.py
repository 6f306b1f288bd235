"""The callbacks of `collectives.tensorflow.keras`."""

from collectives.tensorflow.keras.callbacks import *  # noqa: F403
