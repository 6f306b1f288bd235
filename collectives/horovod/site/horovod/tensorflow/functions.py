"""The functions of `collectives.tensorflow` for variables and objects."""

from horovod.tensorflow import *  # type: ignore[import-not-found]  # noqa: F403
