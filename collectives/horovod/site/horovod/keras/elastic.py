"""`collectives.keras.elastic` under Horovod's name."""

from collectives.keras.elastic import *  # noqa: F403
