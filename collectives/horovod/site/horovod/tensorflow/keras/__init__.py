"""`collectives.tensorflow.keras` under Horovod's name."""

from collectives.tensorflow.keras import *  # noqa: F403
