"""The functions of `collectives.torch` for parameters, optimizer states and objects."""

from collectives.torch import *  # noqa: F403
