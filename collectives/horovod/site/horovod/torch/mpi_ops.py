"""The operations of `collectives.torch`."""

from collectives.errors import OperationError as HorovodInternalError  # noqa: F401
from collectives.torch import *  # noqa: F403
