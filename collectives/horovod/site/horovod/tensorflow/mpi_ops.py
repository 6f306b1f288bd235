"""The operations of `collectives.tensorflow`."""

from collectives.errors import OperationError as HorovodInternalError  # noqa: F401
from horovod.tensorflow import *  # type: ignore[import-not-found]  # noqa: F403
