"""`collectives.torch` under Horovod's name."""

from collectives.torch import *  # noqa: F403
