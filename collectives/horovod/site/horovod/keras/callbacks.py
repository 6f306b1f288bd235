"""The callbacks of `collectives.keras`."""

from collectives.keras.callbacks import *  # noqa: F403
