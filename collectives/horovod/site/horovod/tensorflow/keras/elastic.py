"""`collectives.tensorflow.keras.elastic` under Horovod's name."""

from collectives.tensorflow.keras.elastic import *  # noqa: F403
