"""Horovod's errors."""

from collectives.errors import OperationError as HorovodInternalError

__all__ = ["HorovodInternalError", "HostsUpdatedInterrupt"]


class HostsUpdatedInterrupt(RuntimeError):
    """In elastic jobs, that hosts have come or gone. Never raised here: there are none."""

    def __init__(self, skip_sync: bool) -> None:
        self.skip_sync = skip_sync
