"""`collectives.tensorflow.elastic` under Horovod's name."""

from collectives.tensorflow.elastic import *  # noqa: F403
