"""Horovod's errors."""

from collectives.base.errors import RecoverableError as HorovodInternalError
from collectives.elastic import HostsUpdatedInterrupt

__all__ = [
    "HorovodInternalError",
    "HorovodVersionMismatchError",
    "HostsUpdatedInterrupt",
    "get_version_mismatch_message",
]


def get_version_mismatch_message(name: str, version: str, installed_version: str) -> str:
    """The message of `HorovodVersionMismatchError`."""
    return f"{name} {version} is in use, but {installed_version} was there when Horovod was installed"


class HorovodVersionMismatchError(ImportError):
    """A framework has another version than Horovod was compiled for. Never raised: nothing is compiled."""

    def __init__(self, name: str, version: str, installed_version: str) -> None:
        super().__init__(get_version_mismatch_message(name, version, installed_version), name=name)
        self.version = version
        self.installed_version = installed_version
