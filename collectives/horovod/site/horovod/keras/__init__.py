"""`collectives.keras` under Horovod's name."""

from collectives.keras import *  # noqa: F403
