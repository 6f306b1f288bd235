"""The synchronised batch normalisation of `collectives.torch`."""

from collectives.torch import *  # noqa: F403
